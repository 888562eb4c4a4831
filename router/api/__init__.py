"""The OpenAI HTTP surface: schemas, routes, server-sent events, errors."""
