"""The flows, which put the stages in order, and the `infini` command."""
