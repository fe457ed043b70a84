"""The servers, the worker and the deployments around the flows, and their supervision."""
