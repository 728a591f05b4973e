"""What the PyTorch implementations can do and which configs they have, one module an operation; imports no torch."""
