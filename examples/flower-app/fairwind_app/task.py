"""What is learnt, and from whose data: the one file to change.

Here every node makes the same four clients' data and is one of them, by `partition-id` in its config. Where a
node has data of its own, give `client_app` a function of the node's context that loads it:

    def task(context):
        inputs, targets = ...  # of this node
        return fairwind.Task(model, fairwind.Federation.from_clients([(inputs, targets)], classes=10))
"""

import fairwind

task = fairwind.setup("synthetic:clients=4")
