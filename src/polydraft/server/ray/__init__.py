"""The server in a Ray cluster: copies of the model as one deployment of Ray Serve, the front as another."""
