"""Google Cloud's APIs."""
