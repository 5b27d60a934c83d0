"""Where the parameters of stages rest between steps: buffers on the ranks of `pipe`."""
