"""Everything in front of the engines: the OpenAI API, one request's life, the choice of replicas."""
