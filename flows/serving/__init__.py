"""What stands around the flows: servers, worker, deployments, and who keeps them up."""
