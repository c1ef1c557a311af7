"""Parts that the integrations share: β, bounds written as text, and the value that a KL adds to a loss."""
