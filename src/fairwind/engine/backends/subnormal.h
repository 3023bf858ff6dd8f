#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Within its block, numbers too small for full precision count as zero: processors are slow with them, and
// the probabilities of a model that is sure of itself are such numbers.
struct FlushSubnormal {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr();
  FlushSubnormal() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormal() { _mm_setcsr(before); }
#endif
};
