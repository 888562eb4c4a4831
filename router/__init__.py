"""The router, in front of the engines: the OpenAI API, the life of a request, the choice of replicas."""
