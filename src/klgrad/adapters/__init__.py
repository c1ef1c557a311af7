"""The KL losses of the installed training frameworks: their own code, called as their trainers call it."""

from .registry import FRAMEWORKS as FRAMEWORKS, Framework as Framework
