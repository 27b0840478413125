"""From requests to steps: host bookkeeping around the decoding cycle."""
