"""The messages between clients and server of a real federation, independent of any framework.

A client's reply takes one of two forms, and the server decides which it asks for:

- "report": the update δ_k, and the client's numbers (size, steps, learning rate, losses, gradient norm). The
  server computes coefficient and sums itself, so it can bound every number by those of other clients and log
  which client it bounded. This is the default in a deployment.
- "sums": only coef·δ_k and the algorithm's sums, as secure aggregation needs it. If the server receives such
  replies one by one, it can still bound a client's share of the weight and of the total update. Under secure
  aggregation it sees sums over clients alone, and bounds nothing.

Some types of algorithm need more than one sum. With a report, a client may send a second vector (the change
of its memory, or a gradient), and keep a vector that the server never sees (`Kept`). A round may have a
phase before training (`Aggregator.requests` says what clients are asked, and `turn` ends it). And the server
may hold all updates of a round before it weights them. None of this is possible with sums, or privacy.

Why reports by default? A fair algorithm gives more weight to clients with a high loss, so clients could lie.
Of 20 equal clients, one that overstates its loss tenfold gets 35 % of the weight at α = 1; one that reports a
first loss of 1e-300 gets all of it. From sums alone, a lie cannot be distinguished from a large client.

Whatever the form, no client has more than `Bounds.share` of a round's weight (or twice an equal share, if
that is more), and all that exceed the median weight have no more than `Bounds.together` beyond it. The length
of an update and any other sum, for each unit of weight, are limited to a multiple of the median client's. So
clients that lie together have a share that is known, as long as they are fewer than half. With `Privacy`
other bounds take the place of these: see there. With a `defence`, a robust sum takes the place of the sum.
"""

from fairwind.exchange.bounds import UNBOUNDED, Bounds
from fairwind.exchange.client import LocalClient
from fairwind.exchange.compression import compress
from fairwind.exchange.evaluation import Evaluations, Judged
from fairwind.exchange.kept import Kept
from fairwind.exchange.message import Form, RefusedError, Reply, Request, Tag, arrays_of, sums_form
from fairwind.exchange.own_loop import report_update
from fairwind.exchange.privacy import Privacy
from fairwind.exchange.results import FederatedRun
from fairwind.exchange.server import Aggregator, Round, StalledError

__all__ = [
    "UNBOUNDED",
    "Aggregator",
    "Bounds",
    "Evaluations",
    "FederatedRun",
    "Form",
    "Judged",
    "Kept",
    "LocalClient",
    "Privacy",
    "RefusedError",
    "Reply",
    "Request",
    "Round",
    "StalledError",
    "Tag",
    "arrays_of",
    "compress",
    "report_update",
    "sums_form",
]
