// Lets rows take their steps: calls a compiled step for one number of rows after another.
// The functions declared here are PyTorch's C interface for ahead-of-time compiled code.

#include <cstdint>
#include <cstddef>
#include <vector>

#include "subnormal.h"

extern "C" {

struct AtenTensorOpaque;
using Handle = AtenTensorOpaque*;

int32_t aoti_torch_create_tensor_from_blob(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset,
    int32_t dtype, int32_t device_type, int32_t device_index, Handle* made);
int32_t aoti_torch__reinterpret_tensor(
    Handle tensor, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset, Handle* made);
int32_t aoti_torch_new_tensor_handle(Handle tensor, Handle* made);
int32_t aoti_torch_delete_tensor_object(Handle tensor);
int32_t aoti_torch_get_sizes(Handle tensor, int64_t** sizes);
int32_t aoti_torch_get_strides(Handle tensor, int64_t** strides);
int32_t aoti_torch_get_storage_offset(Handle tensor, int64_t* offset);
int32_t aoti_torch_get_data_ptr(Handle tensor, void** data);
int32_t aoti_torch_cpu_baddbmm_out(
    Handle out, Handle self, Handle left, Handle right, double beta, double alpha);

using Run = int32_t (*)(void* container, Handle* inputs, size_t, Handle* outputs, size_t, void*, void*);

}  // extern "C"

namespace {

// Keeps a handle until the end of its block.
struct Owned {
  Handle handle = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned(Owned&& other) noexcept : handle(other.handle) { other.handle = nullptr; }
  ~Owned() { if (handle) aoti_torch_delete_tensor_object(handle); }
};

struct Tensor {
  void* data;
  int32_t dtype;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  Owned base;

  int32_t first(int64_t rows, Handle* made) const {
    std::vector<int64_t> fewer(sizes, sizes + ndim);
    fewer[0] = rows;
    return aoti_torch__reinterpret_tensor(base.handle, ndim, fewer.data(), strides, 0, made);
  }
};

// keep·w − push·offset + leftᵀ·right for a few rows of a matrix, and a few vectors of numbers of each, at once:
// what lies between stays in registers.
template <typename T, int ROWS, int VECTORS, int WIDTH>
inline void shift_tile(
    T* w, const T* offset, const T* left, const T* right, int64_t columns, int64_t batch, T keep, T push) {
  typedef T Vector __attribute__((vector_size(WIDTH * sizeof(T)), aligned(sizeof(T)), may_alias));
  Vector sum[ROWS][VECTORS];
  for (int o = 0; o < ROWS; ++o)
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = o * columns + v * WIDTH;
      sum[o][v] = keep * *(const Vector*)(w + at) - push * *(const Vector*)(offset + at);
    }
  for (int64_t b = 0; b < batch; ++b)
    for (int v = 0; v < VECTORS; ++v) {
      const Vector x = *(const Vector*)(right + b * columns + v * WIDTH);
      for (int o = 0; o < ROWS; ++o) sum[o][v] += left[o * batch + b] * x;
    }
  for (int o = 0; o < ROWS; ++o)
    for (int v = 0; v < VECTORS; ++v) *(Vector*)(w + o * columns + v * WIDTH) = sum[o][v];
}

template <typename T, int ROWS>
void shift_rows(T* w, const T* offset, const T* left, const T* right, int64_t columns, int64_t batch, T keep, T push) {
  constexpr int wide = 64 / sizeof(T), vectors = 4;
  int64_t i = 0;
  for (; i + vectors * wide <= columns; i += vectors * wide)
    shift_tile<T, ROWS, vectors, wide>(w + i, offset + i, left, right + i, columns, batch, keep, push);
  for (; i + wide <= columns; i += wide)
    shift_tile<T, ROWS, 1, wide>(w + i, offset + i, left, right + i, columns, batch, keep, push);
  for (; i < columns; ++i)
    shift_tile<T, ROWS, 1, 1>(w + i, offset + i, left, right + i, columns, batch, keep, push);
}

// A matrix of numbers as it is found: any strides.
struct Found {
  void* data = nullptr;
  int64_t *sizes = nullptr, *strides = nullptr;

  int32_t read(Handle tensor) {
    return aoti_torch_get_data_ptr(tensor, &data) || aoti_torch_get_sizes(tensor, &sizes) ||
           aoti_torch_get_strides(tensor, &strides);
  }
};

// The same for the first clients' matrices, whose offsets are those numbered by `which`.
template <typename T>
int32_t shift_and_add(
    const Tensor& target, const Tensor& offset, const Tensor& which, int64_t rows, Handle left_handle,
    Handle right_handle, Handle keep_handle, Handle push_handle) {
  Found left, right, keep, push;
  if (left.read(left_handle) || right.read(right_handle) || keep.read(keep_handle) || push.read(push_handle))
    return 1;
  const int64_t batch = left.sizes[1], outputs = target.sizes[1], columns = target.sizes[2];
  constexpr int few = 4;
  std::vector<T> turned(outputs * batch), packed(batch * columns);  // left, output by output; right, if it must
  for (int64_t r = 0; r < rows; ++r) {
    const T* l = static_cast<const T*>(left.data) + r * left.strides[0];
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t o = 0; o < outputs; ++o)
        turned[o * batch + b] = l[b * left.strides[1] + o * left.strides[2]];
    const T* x = static_cast<const T*>(right.data) + r * right.strides[0];
    if (right.strides[2] != 1 || right.strides[1] != columns) {
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 0; i < columns; ++i)
          packed[b * columns + i] = x[b * right.strides[1] + i * right.strides[2]];
      x = packed.data();
    }
    T* w = static_cast<T*>(target.data) + r * target.strides[0];
    const T* v = static_cast<const T*>(offset.data) + static_cast<const int64_t*>(which.data)[r] * offset.strides[0];
    const T kept = static_cast<const T*>(keep.data)[r], pushed = static_cast<const T*>(push.data)[r];
    int64_t o = 0;
    for (; o + few <= outputs; o += few)
      shift_rows<T, few>(
          w + o * columns, v + o * columns, turned.data() + o * batch, x, columns, batch, kept, pushed);
    for (; o < outputs; ++o)
      shift_rows<T, 1>(
          w + o * columns, v + o * columns, turned.data() + o * batch, x, columns, batch, kept, pushed);
  }
  return 0;
}

// Adds leftᵀ·right to the first rows of a tensor.
int32_t add_product(const Tensor& target, int64_t rows, Handle left, Handle right) {
  int64_t *sizes, *strides, offset;
  if (aoti_torch_get_sizes(left, &sizes) || aoti_torch_get_strides(left, &strides) ||
      aoti_torch_get_storage_offset(left, &offset)) return 1;
  const int64_t turned[] = {sizes[0], sizes[2], sizes[1]};
  const int64_t steps[] = {strides[0], strides[2], strides[1]};
  Owned transposed, sum;
  if (aoti_torch__reinterpret_tensor(left, 3, turned, steps, offset, &transposed.handle) ||
      target.first(rows, &sum.handle)) return 1;
  return aoti_torch_cpu_baddbmm_out(sum.handle, sum.handle, transposed.handle, right, 1, 1);
}

}  // namespace

// Tensors are described one after another: address, type, number of dimensions, sizes, strides. The first
// `by_row` of them have a row for each client. `targets` are the tensors that products are added to, `offsets`
// their offsets, if any, and `which` says which of an offset's rows is a client's.
extern "C" int32_t take_steps(
    Run run, void* container, const int64_t* described, int64_t, int64_t tensors, int64_t by_row,
    const int64_t* counts, int64_t steps, const int64_t* targets, int64_t products, const int64_t* offsets,
    int64_t shifted, int64_t which) {
  const int32_t cpu = 0, float64 = 7;
  const FlushSubnormal within;
  std::vector<Tensor> all(tensors);
  for (auto& t : all) {
    t.data = reinterpret_cast<void*>(*described++);
    t.dtype = static_cast<int32_t>(*described++);
    t.ndim = *described++;
    t.sizes = described;
    t.strides = described + t.ndim;
    described += 2 * t.ndim;
    if (aoti_torch_create_tensor_from_blob(
            t.data, t.ndim, t.sizes, t.strides, 0, t.dtype, cpu, 0, &t.base.handle)) return 1;
  }
  std::vector<Handle> inputs(tensors), outputs(2 * products + (shifted ? 2 : 0));
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t i = 0; i < tensors; ++i) {
      const int32_t failed = i < by_row ? all[i].first(counts[s], &inputs[i])
                                        : aoti_torch_new_tensor_handle(all[i].base.handle, &inputs[i]);
      if (failed) return 1;
    }
    // It takes the inputs' handles over, and gives the outputs' away.
    if (run(container, inputs.data(), tensors, outputs.data(), outputs.size(), nullptr, nullptr)) return 1;
    Owned keep, push;
    if (shifted) {
      keep.handle = outputs[2 * products];
      push.handle = outputs[2 * products + 1];
    }
    for (int64_t p = 0; p < products; ++p) {
      Owned left, right;
      left.handle = outputs[2 * p];
      right.handle = outputs[2 * p + 1];
      const Tensor& target = all[targets[p]];
      const auto add = target.dtype == float64 ? shift_and_add<double> : shift_and_add<float>;
      const int32_t failed =
          shifted ? add(target, all[offsets[p]], all[which], counts[s], left.handle, right.handle, keep.handle,
                     push.handle)
               : add_product(target, counts[s], left.handle, right.handle);
      if (failed) return 1;
    }
  }
  return 0;
}
