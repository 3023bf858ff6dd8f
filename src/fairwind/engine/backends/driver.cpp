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
// `by_row` of them have a row for each client. `targets` are the tensors that products are added to.
extern "C" int32_t take_steps(
    Run run, void* container, const int64_t* described, int64_t, int64_t tensors, int64_t by_row,
    const int64_t* counts, int64_t steps, const int64_t* targets, int64_t products) {
  const int32_t cpu = 0;
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
  std::vector<Handle> inputs(tensors), outputs(2 * products);
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t i = 0; i < tensors; ++i) {
      const int32_t failed = i < by_row ? all[i].first(counts[s], &inputs[i])
                                        : aoti_torch_new_tensor_handle(all[i].base.handle, &inputs[i]);
      if (failed) return 1;
    }
    // It takes the inputs' handles over, and gives the outputs' away.
    if (run(container, inputs.data(), tensors, outputs.data(), outputs.size(), nullptr, nullptr)) return 1;
    for (int64_t p = 0; p < products; ++p) {
      Owned left, right;
      left.handle = outputs[2 * p];
      right.handle = outputs[2 * p + 1];
      if (add_product(all[targets[p]], counts[s], left.handle, right.handle)) return 1;
    }
  }
  return 0;
}
