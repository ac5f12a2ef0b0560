"""The parts of zgraph that use torch's private parts: a torch release that moves something should break this package
alone."""
