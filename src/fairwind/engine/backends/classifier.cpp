// The steps of linear classifiers: the cross-entropy of the scores W·x + b, its gradient g, and SGD along
// s·g + μ·y + v, where y = (W, b), and an algorithm may give s, μ and v.
//
// One row takes all its steps before the next begins, so that its weights and samples stay in the nearest
// cache. A vector holds the scores of all classes for one sample. So W is kept feature by feature, padded to
// whole vectors; its last line is b, and −∞ where there is no class.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <vector>

#include "subnormal.h"

namespace {

constexpr int BYTES = 64;  // of a vector
constexpr int64_t MOST = 8;  // samples at once: each has a register

template <typename T, int SIZE = BYTES>
using Vector __attribute__((vector_size(SIZE), aligned(sizeof(T)), may_alias)) = T;

template <typename T>
constexpr int LANES = BYTES / sizeof(T);

template <typename T>
Vector<T>& at(T* place) { return *reinterpret_cast<Vector<T>*>(place); }

template <typename T>
const Vector<T>& at(const T* place) { return *reinterpret_cast<const Vector<T>*>(place); }

// The numbers of a vector, joined in halves: it needs few operations, in the same order on every machine.
template <typename T, int SIZE, typename Join>
T folded(Vector<T, SIZE> all, Join join) {
  if constexpr (SIZE == sizeof(T)) {
    return all[0];
  } else {
    Vector<T, SIZE / 2> half[2];
    std::memcpy(half, &all, SIZE);
    return folded<T, SIZE / 2>(join(half[0], half[1]), join);
  }
}

// eˣ where x ≤ 0: 2ᵏ times a Taylor series around 0, for numbers up to ln(2)/2.
inline Vector<float> exponential(Vector<float> x) {
  constexpr float whole = 12582912;  // 1.5·2²³: a number that is added to it is rounded to its last bits
  const Vector<float> shifted = x * 1.44269504f + whole, k = shifted - whole;
  const Vector<float> r = x - k * 0.693145752f - k * 1.42860677e-6f;  // ln(2) in two parts
  Vector<float> sum = r * (1.0f / 5040) + 1.0f / 720;
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * r + term;
  const auto power = (reinterpret_cast<const Vector<uint32_t>&>(shifted) << 23) + 0x3F800000u;
  return x < -87.0f ? Vector<float>{} : sum * reinterpret_cast<const Vector<float>&>(power);
}

inline Vector<double> exponential(Vector<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// The model of a row, as lines of `width` numbers.
template <typename T>
struct Row {
  int64_t features, width;
  T *w, *sums;  // (features + 1, width) each; to the second, gradients are added, and it may be the first
  bool biased;

  // The scores of N samples.
  template <int N>
  void score(const T* const* samples, T* scores) const {
    const int64_t features = this->features, width = this->width;
    const T* x[N];
    std::memcpy(x, samples, sizeof(x));
    for (int64_t v = 0; v < width; v += LANES<T>) {
      Vector<T> sum[N];
      for (int n = 0; n < N; ++n) sum[n] = at(w + features * width + v);
      const T* line = w + v;
      for (int64_t i = 0; i < features; ++i, line += width)
        for (int n = 0; n < N; ++n) sum[n] += x[n][i] * at(line);
      for (int n = 0; n < N; ++n) at(scores + n * width + v) = sum[n];
    }
  }

  // Adds the gradients of N samples, from those of their scores.
  template <int N>
  void add(const T* const* samples, const T* of_scores) const {
    const int64_t features = this->features, width = this->width;
    const T* x[N];
    std::memcpy(x, samples, sizeof(x));
    for (int64_t v = 0; v < width; v += LANES<T>) {
      Vector<T> g[N];
      for (int n = 0; n < N; ++n) g[n] = at(of_scores + n * width + v);
      T* line = sums + v;
      for (int64_t i = 0; i < features; ++i, line += width) {
        Vector<T> sum = at(line);
        for (int n = 0; n < N; ++n) sum += x[n][i] * g[n];
        at(line) = sum;
      }
      for (int n = 0; biased && n < N; ++n) at(line) += g[n];
    }
  }

  // Takes the step −rate·(μ·y + v).
  void shift(const T* v, T pull, T rate) const {
    const T keep = 1 - rate * pull;
    for (int64_t i = 0; i < (features + biased) * width; i += LANES<T>)
      at(w + i) = keep * at(w + i) - rate * at(v + i);
  }

  // Turns a sample's scores into their gradients, times a factor; returns its loss, or 0 if not `asked`.
  T judge(T* scores, int64_t label, T factor, bool asked) const {
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    const auto sum = [](auto a, auto b) { return a + b; };
    Vector<T> most = at(scores);
    for (int64_t v = LANES<T>; v < width; v += LANES<T>) most = larger(most, at(scores + v));
    const T highest = folded<T, BYTES>(most, larger), own = scores[label] - highest;
    Vector<T> all{};
    for (int64_t v = 0; v < width; v += LANES<T>) all += at(scores + v) = exponential(at(scores + v) - highest);
    const T total = folded<T, BYTES>(all, sum);
    for (int64_t v = 0; v < width; v += LANES<T>) at(scores + v) *= factor / total;
    scores[label] -= factor;
    return asked ? std::log(total) - own : 0;
  }
};

// Calls `work` with a constant for the number of samples, of at most MOST, and the first of them: all in turn.
template <int N = MOST, typename Work>
void in_turn(int64_t first, int64_t count, Work work) {
  if (count > N) {  // halves, for one sample alone would leave the processor waiting for each sum
    in_turn(first, count / 2, work);
    in_turn(first + count / 2, count - count / 2, work);
  } else if constexpr (N > 1) {
    count == N ? work(std::integral_constant<int, N>(), first) : in_turn<N - 1>(first, count, work);
  } else {
    if (count) work(std::integral_constant<int, 1>(), first);
  }
}

enum Kind { training, gradient, loss };

// Tensors of rows: (classes, features) or (classes,) each.
template <typename T>
struct Part {
  T* data;  // none if null
  int64_t by_row, by_class, by_feature;
};

template <typename T>
struct Task {
  int64_t kind, rows, classes, features, batch, steps;
  Part<T> weight, bias, weight_sum, bias_sum, weight_offset, bias_offset;
  T* losses;
  const T *inputs, *rate;
  const int64_t *labels, *table, *counts;
  // By row, or null: μ, which of the scales s is its own, or −1 for 1, and which v.
  const T* pull;
  const int64_t *scaled, *offset;
  const T* scales;

  void run() const {
    const FlushSubnormal within;
    const bool apart = kind == gradient, shifts = weight_offset.data;
    const int64_t width = (classes + LANES<T> - 1) / LANES<T> * LANES<T>, size = (features + 1) * width;
    std::vector<T> room((1 + apart + shifts) * size + batch * width + LANES<T>);
    T* w = room.data();
    while (reinterpret_cast<uintptr_t>(w) % BYTES) ++w;
    T *const v = w + (1 + apart) * size, *const scores = v + shifts * size;
    const Row<T> row{features, width, w, w + apart * size, bias.data != nullptr};
    const auto get = [](T& there, T& here) { here = there; };
    std::vector<const T*> samples(batch);
    std::vector<int64_t> label(batch);
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(w, 0, (1 + apart + shifts) * size * sizeof(T));
      copy(weight, bias, r, w, width, get);
      if (shifts) copy(weight_offset, bias_offset, offset[r], v, width, get);
      const T scale = scaled && scaled[r] >= 0 ? scales[scaled[r]] : T(1);
      T total = 0;
      const int64_t* next = table + r * batch;
      for (int64_t s = 0; s < steps && r < counts[s]; next += counts[s++] * batch) {
        int64_t count = 0;
        for (int64_t b = 0; b < batch; ++b) {
          if (next[b] < 0) continue;  // padding
          samples[count] = inputs + next[b] * features;
          label[count++] = labels[next[b]];
        }
        if (!count) continue;
        for (int64_t c = classes; c < width; ++c) w[features * width + c] = -std::numeric_limits<T>::infinity();
        in_turn(0, count, [&](auto n, int64_t first) {
          row.template score<n>(&samples[first], scores + first * width);
        });
        const T factor = kind == training ? -*rate * scale / count : T(1);
        for (int64_t b = 0; b < count; ++b)
          total += row.judge(scores + b * width, label[b], factor, kind != training);
        if (shifts) row.shift(v, pull[r], *rate);
        if (kind != loss)
          in_turn(0, count, [&](auto n, int64_t first) {
            row.template add<n>(&samples[first], scores + first * width);
          });
      }
      if (kind == training) copy(weight, bias, r, w, width, [](T& there, T& here) { there = here; });
      if (kind == gradient)
        copy(weight_sum, bias_sum, r, row.sums, width, [](T& there, T& here) { there += here; });
      if (kind != training) losses[r] += total;
    }
  }

  // Copies a row's numbers from or to its lines.
  template <typename Copy>
  void copy(const Part<T>& weight, const Part<T>& bias, int64_t r, T* lines, int64_t width, Copy copy) const {
    for (int64_t i = 0; i < features; ++i)
      for (int64_t c = 0; c < classes; ++c)
        copy(weight.data[r * weight.by_row + c * weight.by_class + i * weight.by_feature], lines[i * width + c]);
    for (int64_t c = 0; bias.data && c < classes; ++c)
      copy(bias.data[r * bias.by_row + c * bias.by_class], lines[features * width + c]);
  }
};

}  // namespace

// A task is given as the numbers and addresses that it consists of.
extern "C" void classify_float(const Task<float>* task) { task->run(); }
extern "C" void classify_double(const Task<double>* task) { task->run(); }
