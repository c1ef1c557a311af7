"""Questions of our own; no paper makes these claims."""
