"""Distributed values: one component for each replica."""
