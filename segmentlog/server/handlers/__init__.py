"""Handlers of requests: one module for each family of APIs.

A handler is a function that takes the context and the decoded body of a request, and returns the response.
"""
