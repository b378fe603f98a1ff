"""Resolvers that only Google's clouds need."""
