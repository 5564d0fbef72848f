"""Groups, hops, collectives, launch and the traffic record: the only place that creates a group or sends a byte."""
