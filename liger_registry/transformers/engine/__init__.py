"""The adapter engine: finds what it can speed up in a model by what its code does, and binds it on that instance."""
