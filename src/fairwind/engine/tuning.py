"""All constants that tune speed. None changes results beyond rounding.

Each has its unit in its name, and says what it trades and which benchmark supports it; "not measured" says
that none is recorded. Files are in `benchmarks/`, and their results in `benchmarks/results/`.
"""

from typing import NamedTuple


class Sizes(NamedTuple):
    """How much is computed at once on a kind of device: more takes memory, less takes more calls."""

    evaluated_numbers: int  # activations of a batch of test samples: near a CPU's cache; not measured
    gram_numbers: int  # of updates that are multiplied, in a CPU's cache; not measured
    probed_samples: int  # of a client in a stacked probe, which pads clients that have fewer; not measured
    even_chunks: bool  # of one size, so that all use the same memory, and CUDA graphs are few; not measured
    compile_seconds: float  # against those that compiled steps save; results/engine-cpu.json, engine-h200


CPU = Sizes(1 << 22, 1 << 18, 64, even_chunks=False, compile_seconds=30)
GPU = Sizes(1 << 28, 1 << 26, 256, even_chunks=True, compile_seconds=60)

# What is computed at once on any device.
MAX_LOOP_PROBED_SAMPLES = 512  # of a client in the loop, which pads nothing; not measured
MAX_CACHED_NUMBERS = 1 << 18  # of vectors that several operations pass over; not measured
MAX_SUMMED_UPDATES = 8  # added in the model's type before their sum goes on in float64; not measured
MAX_REPORTED_CLIENTS = 64  # of the loop, whose reports and coefficients are computed at once,
MAX_REPORTED_NUMBERS = 1 << 20  # and numbers of their updates, which are kept until then; zoo_speed.py
MAX_EXCHANGED_NUMBERS = 1 << 22  # of clients' vectors that ranks exchange at once; not measured
MAX_FITTED_NUMBERS = 1 << 22  # of outputs that are looked at together to fit a loss; not measured

# How clients are cut into chunks, and shared by threads.
CPU_MEMORY_GIB = (
    1 / 32
)  # for clients that train at once, near the cache; not recorded: 1/2 took twice as long
GPU_MEMORY_SHARE = 1 / 4  # of a GPU's memory, for the same; not measured
GPU_DATA_SHARE = 1 / 2  # of a GPU's memory that samples may take, else they stay on the host; not measured
GPU_CLIENT_VECTORS_SHARE = 1 / 4  # of the memory for clients, for vectors that clients keep; not measured
SERVER_UPDATES_SHARE = 1 / 2  # of the memory, for updates that a server sees all at once; not measured
ROBUST_SUM_COPIES = 7  # of one run's updates, in bytes, that a robust sum needs in float64; not measured
MIN_NUMBERS_PER_LAUNCH = 1 << 14  # with these, launching takes a quarter of an operation's time; zoo_speed.py
MIN_SHARED_NUMBERS = 1 << 24  # that pass through steps, for which waking several workers pays; not measured
MAX_REUSED_CHUNKS = 16  # of a worker whose index tables are kept, if all rounds are alike; not measured

# CUDA graphs: they cost memory and time to record.
MAX_GRAPH_STEPS = 3000  # of a round that is recorded as a whole; not measured
MAX_GRAPH_ROW_COUNTS = 128  # numbers of rows with a graph; others are rounded up to these; not measured

# Which executor, and how many threads: fits to measured steps of small and middle-sized modules, on a core
# of a server; only the ratios of seconds matter. zoo_speed.py compares what is chosen with a plain loop.
LOOP_SECONDS_PER_CLIENT = 134e-6
LOOP_SECONDS_PER_OPERATION = 5e-6
LOOP_SECONDS_PER_REPLACED_OPERATION = 9e-6  # where functions are replaced in a mode, which slows every call
LOOP_SECONDS_PER_CONVOLUTION = 110e-6
LOOP_SECONDS_PER_RECURRENT_LAYER = 235e-6
LOOP_SECONDS_PER_FLOP = 16e-12
STACKED_SECONDS_PER_OPERATION = 22e-6
STACKED_SECONDS_PER_NUMBER = 3.9e-9
STACKED_SECONDS_PER_PARAMETER = 1.3e-9
STACKED_SECONDS_PER_FLOP = 6e-12
LOOP_SERIAL_SHARE = 0.2  # of a step's time that further workers do not divide,
STACKED_SERIAL_SHARE = 0.4  # and the same stacked
SURE_LOOP_SHARE = 0.9  # of the loop's estimated time; the loop is the safe choice where both are close
MIN_THREADED_SECONDS = 3e-4  # of a step's kernels, for which threads gain more than they wait for the GIL
MIN_LARGE_PARAMETERS = 1 << 20  # of a model whose kernels fill all cores in the loop,
MIN_LARGE_STEP_FLOPS = 5e9  # or of its local step; ablation.py: threads, on a busy machine 0.9×

# What compiled steps save, and how long it takes; results/engine-cpu.json, results/engine-h200
HANDWRITTEN_SECONDS = 3  # C++ that is at hand
SAVED_SECONDS_PER_CALL = 1e-3  # of a compiled step on a CPU, about
SAVED_SECONDS_PER_NUMBER = 3e-12  # that a row holds in a step on a GPU, where passes over memory are saved

# Special paths, and from where on they pay.
MIN_FACTORED_NUMBERS = 1 << 14  # of a weight whose gradient is not stored; ablation.py: 1.2 to 1.3×
MAX_CLASSIFIER_BYTES = 1 << 20  # of the weight of hand-written steps, for the cache; ablation.py: 2.3 to 2.5×
MIN_CHANNELS_LAST_FLOPS = 10**5  # of a sample; zoo_speed.py: below, reordering costs more than it gains
MAX_CONVOLUTIONS_BYTES = 1 << 20  # of the weights of hand-written steps; results/small-convs-cpu.json
MIN_SINGLE_SCORED_FLOPS = 10**7  # of a sample, with which one model fills a GPU; results/resnet-h200.json

NUMPY_SORTS = (
    True  # on a CPU, instead of PyTorch's, which takes ten times as long; engine.py: 1.1× of a round
)

# Layers on a GPU; results/engine-h200, results/sent140-h200.json
MAX_IN_PLACE_OUTPUTS = 128  # of a 16-bit convolution that reads windows in place: a slower product
MAX_LSTM_UNITS = 128  # whose weights fit on the chip
LSTM_SEQUENCES = 16  # of a program: the fewest that tensor cores multiply
MIN_SHARED_MEMORY_BYTES = 160 << 10  # of a GPU that runs our kernels: an A100 or newer, no graphics card
MIN_GPU_PROGRAMS = 512  # that keep a GPU busy, for sums over pixels in parts,
MIN_SUMMED_PIXELS = 256  # of so many pixels at least; not measured
