"""What clients and a server of a real federation tell each other; no framework is imported here.

A client's reply takes one of two forms, and the server decides which it asks for:

- "report": the update δ_k, and the client's numbers (size, steps, learning rate, losses, gradient norm). The
  server computes coefficient and sums itself. So it can bound every number by what the other clients have
  said, and say for which client it had to. This is the default in a deployment.
- "sums": coef·δ_k and the algorithm's sums, and nothing else. This is what can be added up in secret. A
  server that receives such replies one by one can still bound a client's share of the weight and of the total
  update. Under secure aggregation it sees no client's, and clients must bound themselves.

Why not always the second? A fair algorithm gives weight to clients that say they lag behind, so it invites
lies. Of 20 equal clients, one that overstates its loss tenfold has 35 % of the weight at α = 1; one that
states a first loss of 1e-300 has all of it. From sums alone, a lie cannot be told from a large client.

Whatever the form, no client has more than `Bounds.share` of a round's weight, twice that of the norms of the
round's updates, and half of any other sum (or twice an equal share, if that is more). With `Privacy` other
bounds take the place of these: see there.
"""

from fairwind.exchange.bounds import UNBOUNDED, Bounds
from fairwind.exchange.client import LocalClient
from fairwind.exchange.evaluation import Evaluations, Judged
from fairwind.exchange.message import Form, RefusedError, Reply, arrays_of, sums_form
from fairwind.exchange.own_loop import report_update
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.results import FederatedRun
from fairwind.exchange.server import Aggregator, Round

__all__ = [
    "UNBOUNDED",
    "Aggregator",
    "Bounds",
    "Evaluations",
    "FederatedRun",
    "Form",
    "Judged",
    "LocalClient",
    "Privacy",
    "RefusedError",
    "Reply",
    "Round",
    "arrays_of",
    "report_update",
    "sums_form",
]
