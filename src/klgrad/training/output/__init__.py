"""What is printed and drawn about a run."""
