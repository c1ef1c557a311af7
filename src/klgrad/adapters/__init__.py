"""What the installed training frameworks descend: their own KL code, called as their trainers call it."""

from .registry import FRAMEWORKS as FRAMEWORKS, Framework as Framework
