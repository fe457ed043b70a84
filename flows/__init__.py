"""The story: which stage follows which, and the `infini` command."""
