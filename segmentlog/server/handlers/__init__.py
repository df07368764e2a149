"""Handlers of requests, a module for each family of APIs.

A handler takes the request's context and its decoded body.
"""
