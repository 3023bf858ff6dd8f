// The steps of small convolutional networks: stages of a convolution, ReLU and max pooling, then dense layers,
// which are convolutions of one pixel; the cross-entropy of the last stage's outputs; and SGD along s·g + μ·y + v.
//
// One row takes all its steps before the next begins, and one sample passes through all stages before the next
// one, so that weights and activations stay in the nearest caches. Channels are last in memory, padded to whole
// vectors. A stage's weights are lines of outputs, one for each input of a window, and the last is its bias.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "subnormal.h"

namespace {

constexpr int64_t PIXELS = 12;  // of a tile: with two vectors of each, sums fill the registers of AVX-512

enum Kind { training, gradient, loss };

// Calls `work` with a constant for the number of items, of at most PIXELS, and the first: all in turn.
template <int N = PIXELS, typename Work>
void in_turn(int64_t first, int64_t count, Work work) {
  if constexpr (N == PIXELS)
    for (; count >= N; first += N, count -= N) work(std::integral_constant<int, N>(), first);
  if constexpr (N > 1) {
    count == N - 1 ? work(std::integral_constant<int, N - 1>(), first) : in_turn<N - 1>(first, count, work);
  }
}

template <typename T>
struct Network {
  static constexpr int64_t LANES = 64 / sizeof(T);  // of a vector
  using Vector __attribute__((vector_size(64), aligned(sizeof(T)), may_alias)) = T;

  static Vector& at(T* place) { return *reinterpret_cast<Vector*>(place); }
  static const Vector& at(const T* place) { return *reinterpret_cast<const Vector*>(place); }

  // Calls `work` with one or two vectors at a time, and the first number of them.
  template <typename Work>
  static void by_vectors(int64_t width, Work work) {
    int64_t v = 0;
    for (; v + 2 * LANES <= width; v += 2 * LANES) work(std::integral_constant<int, 2>(), v);
    if (v < width) work(std::integral_constant<int, 1>(), v);
  }

  // An image of (height, width, channels).
  struct Image {
    int64_t height, width, channels;
    T* data;
    T* row(int64_t y) const { return data + y * width * channels; }
    int64_t size() const { return height * width * channels; }
  };

  // Outputs of every window of an image, from lines of weights, and a line of biases if there is one.
  static void convolve(const Image& in, int64_t kh, int64_t kw, const T* lines, const T* bias, const Image& out) {
    const int64_t span = kw * in.channels, line = in.width * in.channels, step = in.channels, width = out.channels;
    by_vectors(width, [&](auto vectors, int64_t v) {
      constexpr int V = decltype(vectors)::value;
      for (int64_t y = 0; y < out.height; ++y)
        in_turn(0, out.width, [&](auto pixels, int64_t x) {
          constexpr int P = decltype(pixels)::value;
          Vector sum[P][V];
          for (int i = 0; i < V; ++i) {
            const Vector first = bias ? at(bias + v + i * LANES) : Vector{};
            for (int p = 0; p < P; ++p) sum[p][i] = first;
          }
          const T* w = lines + v;
          for (int64_t ky = 0; ky < kh; ++ky) {
            const T* from = in.data + (y + ky) * line + x * step;
            for (int64_t j = 0; j < span; ++j, w += width)
              for (int p = 0; p < P; ++p)
                for (int i = 0; i < V; ++i) sum[p][i] += from[p * step + j] * at(w + i * LANES);
          }
          T* to = out.row(y) + x * width + v;
          for (int p = 0; p < P; ++p)
            for (int i = 0; i < V; ++i) at(to + p * width + i * LANES) = sum[p][i];
        });
    });
  }

  // Adds the gradients of lines of weights and biases, from those of the outputs, which lie inside a larger image.
  static void add_gradient(const Image& in, int64_t kh, int64_t kw, const T* of_outputs, int64_t by_row,
                    const Image& out, T* lines) {
    const int64_t span = kw * in.channels, line = in.width * in.channels, step = in.channels, width = out.channels;
    by_vectors(width, [&](auto vectors, int64_t v) {
      constexpr int V = decltype(vectors)::value;
      for (int64_t ky = 0; ky < kh; ++ky)
        in_turn(0, span, [&](auto items, int64_t j) {
          constexpr int J = decltype(items)::value;
          Vector sum[J][V]{};
          for (int64_t y = 0; y < out.height; ++y) {
            const T *from = in.data + (y + ky) * line + j, *g = of_outputs + y * by_row + v;
            for (int64_t x = 0; x < out.width; ++x, from += step, g += width)
              for (int k = 0; k < J; ++k)
                for (int i = 0; i < V; ++i) sum[k][i] += from[k] * at(g + i * LANES);
          }
          T* to = lines + (ky * span + j) * width + v;
          for (int k = 0; k < J; ++k)
            for (int i = 0; i < V; ++i) at(to + k * width + i * LANES) += sum[k][i];
        });
      Vector sum[V]{};
      for (int64_t y = 0; y < out.height; ++y)
        for (int64_t x = 0; x < out.width; ++x)
          for (int i = 0; i < V; ++i) sum[i] += at(of_outputs + y * by_row + x * width + v + i * LANES);
      for (int i = 0; i < V; ++i) at(lines + kh * span * width + v + i * LANES) += sum[i];
    });
  }

  struct Stage {
    // As given; the image that it reads has the padding around it.
    int64_t height, width, channels, outputs, kh, kw, padding, relu, pool, biased;
    T *weights, *sums;      // (rows, lines + 1, outputs) each
    const T* offsets;       // the same for v, or null
    // Made here.
    Image in, out, of_out;      // of_out has room for windows that begin outside
    Image of_in;
    std::vector<T> room, reversed, gradient;
    T* w;

    int64_t lines() const { return kh * kw * channels; }
    int64_t numbers() const { return (lines() + 1) * outputs; }
    int64_t by_row() const { return of_out.width * outputs; }
    T* inner() const { return of_out.data + (kh - 1) * by_row() + (kw - 1) * outputs; }

    void prepare() {
      in = {height + 2 * padding, width + 2 * padding, channels, nullptr};
      out = {in.height - kh + 1, in.width - kw + 1, outputs, nullptr};
      of_out = {out.height + 2 * (kh - 1), out.width + 2 * (kw - 1), outputs, nullptr};
      of_in = in;
      room.assign(2 * in.size() + out.size() + of_out.size(), 0);
      in.data = room.data();
      of_in.data = in.data + in.size();
      out.data = of_in.data + in.size();
      of_out.data = out.data + out.size();
      reversed.resize(lines() * outputs);
      gradient.resize(numbers());
    }

    // Lines of channels, for each output, of the kernel turned around: they give the gradient of the image.
    void reverse() {
      for (int64_t k = 0; k < kh * kw; ++k)
        for (int64_t c = 0; c < channels; ++c)
          for (int64_t o = 0; o < outputs; ++o)
            reversed[((kh * kw - 1 - k) * outputs + o) * channels + c] = w[(k * channels + c) * outputs + o];
    }

    // Computes outputs, and puts them into the next stage's image, or to `last`.
    void forward(const Stage* next, T* last) const {
      convolve(in, kh, kw, w, w + lines() * outputs, out);
      for (int64_t i = 0; relu && i < out.size(); i += LANES) {
        const Vector value = at(out.data + i);
        at(out.data + i) = value < T(0) ? Vector{} : value;
      }
      const int64_t rows = out.height / pool, columns = out.width / pool, border = next ? next->padding : 0;
      const int64_t there = next && next->height * next->width > 1 ? next->in.width * outputs : columns * outputs;
      T* to = next ? next->in.data + border * (there + outputs) : last;
      for (int64_t y = 0; y < rows; ++y)
        for (int64_t x = 0; x < columns; ++x)
          for (int64_t v = 0; v < outputs; v += LANES) {
            const T* from = out.row(y * pool) + x * pool * outputs + v;
            Vector most = at(from);
            for (int64_t k = 1; k < pool * pool; ++k) {
              const Vector value = at(from + k / pool * out.width * outputs + k % pool * outputs);
              most = (value > most) | (value != value) ? value : most;
            }
            at(to + y * there + x * outputs + v) = most;
          }
    }

    // From the gradients of what was put there: those of outputs, of weights, and of the image if it is asked for.
    void backward(const Stage* next, const T* last, bool image) {
      const int64_t rows = out.height / pool, columns = out.width / pool, border = next ? next->padding : 0;
      const int64_t there = next && next->height * next->width > 1 ? next->in.width * outputs : columns * outputs;
      const T* from = next ? next->of_in.data + border * (there + outputs) : last;
      T* const to = inner();
      if (rows * pool < out.height || columns * pool < out.width)
        std::fill_n(of_out.data, of_out.size(), T(0));
      for (int64_t y = 0; y < rows; ++y)
        for (int64_t x = 0; x < columns; ++x)
          for (int64_t v = 0; v < outputs; v += LANES) {
            const Vector g = at(from + y * there + x * outputs + v);
            const T* values = out.row(y * pool) + x * pool * outputs + v;
            T* place = to + y * pool * by_row() + x * pool * outputs + v;
            Vector most = at(values);
            for (int64_t k = 1; k < pool * pool; ++k) {
              const Vector value = at(values + k / pool * out.width * outputs + k % pool * outputs);
              most = value > most ? value : most;
            }
            Vector left = relu ? (most <= T(0) ? Vector{} : g) : g;
            for (int64_t k = 0; k < pool * pool; ++k) {  // the first of equal ones
              const Vector value = at(values + k / pool * out.width * outputs + k % pool * outputs);
              at(place + k / pool * by_row() + k % pool * outputs) = value == most ? left : Vector{};
              left = value == most ? Vector{} : left;
            }
          }
      add_gradient(in, kh, kw, to, by_row(), out, gradient.data());
      if (!biased) std::fill_n(gradient.data() + lines() * outputs, outputs, T(0));
      if (image) convolve(of_out, kh, kw, reversed.data(), nullptr, of_in);
    }
  };

  struct Task {
    int64_t kind, rows, batch, steps, stages, classes, pixels, channels;
    T* losses;
    const T *inputs, *rate;
    const int64_t *labels, *table, *counts;
    // By row, or null: μ, which of the scales s is its own, or −1 for 1, and which v.
    const T* pull;
    const int64_t *scaled, *offset;
    const T* scales;
    Stage* stage;

    // Turns a sample's scores into their gradients, times a factor; returns its loss.
    T judge(T* scores, int64_t label, T factor) const {
      const T most = *std::max_element(scores, scores + classes), own = scores[label] - most;
      T total = 0;
      for (int64_t c = 0; c < classes; ++c) total += scores[c] = std::exp(scores[c] - most);
      for (int64_t c = 0; c < classes; ++c) scores[c] *= factor / total;
      scores[label] -= factor;
      return std::log(total) - own;
    }

    // Puts a sample (channels, pixels) into the first stage's image, channels last.
    void show(int64_t sample) const {
      const Stage& first = *stage;
      const T* from = inputs + sample * pixels * channels;
      for (int64_t c = 0; c < channels; ++c)
        for (int64_t y = 0; y < first.height; ++y)
          for (int64_t x = 0; x < first.width; ++x)
            first.in.row(y + first.padding)[(x + first.padding) * first.channels + c] = *from++;
    }

    void run() const {
      const FlushSubnormal within;
      for (int64_t i = 0; i < stages; ++i) stage[i].prepare();
      std::vector<T> scores(stage[stages - 1].outputs);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < stages; ++i) {
          stage[i].w = stage[i].weights + r * stage[i].numbers();
          std::fill(stage[i].gradient.begin(), stage[i].gradient.end(), T(0));
        }
        const T scale = scaled && scaled[r] >= 0 ? scales[scaled[r]] : 1;
        T total = 0;
        const int64_t* next = table + r * batch;
        for (int64_t s = 0; s < steps && r < counts[s]; next += counts[s++] * batch) {
          const int64_t count = std::count_if(next, next + batch, [](int64_t n) { return n >= 0; });
          if (!count) continue;
          for (int64_t i = 1; kind != loss && i < stages; ++i) stage[i].reverse();
          const T factor = kind == training ? -*rate * scale / count : 1;
          for (int64_t b = 0; b < batch; ++b) {
            if (next[b] < 0) continue;  // padding
            show(next[b]);
            for (int64_t i = 0; i < stages; ++i) stage[i].forward(i + 1 < stages ? stage + i + 1 : nullptr, scores.data());
            total += judge(scores.data(), labels[next[b]], factor);
            for (int64_t i = stages - 1; kind != loss && i >= 0; --i)
              stage[i].backward(i + 1 < stages ? stage + i + 1 : nullptr, scores.data(), i > 0);
          }
          if (kind == training) update(r);
        }
        if (kind == gradient)
          for (int64_t i = 0; i < stages; ++i)
            std::copy(stage[i].gradient.begin(), stage[i].gradient.end(), stage[i].sums + r * stage[i].numbers());
        if (kind != training) losses[r] += total;
      }
    }

    // Takes a step along the gradient, which is scaled already, and −rate·(μ·y + v).
    void update(int64_t r) const {
      for (int64_t i = 0; i < stages; ++i) {
        Stage& own = stage[i];
        const T* v = own.offsets ? own.offsets + offset[r] * own.numbers() : nullptr;
        const T keep = v ? 1 - *rate * pull[r] : 1;
        for (int64_t n = 0; n < own.numbers(); n += LANES) {
          Vector value = at(own.w + n) + at(own.gradient.data() + n);
          if (v) value += (keep - 1) * at(own.w + n) - *rate * at(v + n);
          at(own.w + n) = value;
          at(own.gradient.data() + n) = Vector{};
        }
      }
    }
  };
};

// A task is given as numbers and addresses, with ten numbers and three addresses for each stage.
template <typename T>
void run(const int64_t* given) {
  typename Network<T>::Task task;
  std::memcpy(static_cast<void*>(&task), given, 18 * sizeof(int64_t));
  std::vector<typename Network<T>::Stage> stages(task.stages);
  for (int64_t i = 0; i < task.stages; ++i)
    std::memcpy(static_cast<void*>(&stages[i]), given + 18 + 13 * i, 13 * sizeof(int64_t));
  task.stage = stages.data();
  task.run();
}

}  // namespace

extern "C" void convolve_float(const int64_t* task) { run<float>(task); }
extern "C" void convolve_double(const int64_t* task) { run<double>(task); }
