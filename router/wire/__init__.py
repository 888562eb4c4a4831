"""The links to the workers: requests on their way there, tokens on their way back."""
