// Whether a gradient may be reduced where it lies.
//
// Several tensors can share the memory of a gradient. `p.view(n) + q.view(n)` gives p and q
// gradients of one storage, and `x + position.view(n)` gives position a gradient that x's own node
// still has to read. To change such a gradient in place would change the other tensor too.
//
// The number of uses of the gradient's storage decides, but the plain number is misleading. When
// autograd has taken over the hook's input, the input is a second use. When the input is a view,
// autograd's view metadata keep the view's base, which is a third use. So for the weight of every
// Linear: its input is the transpose of a product. That base is harmless as long as nothing but the
// view refers to it.
//
// Measured with LibTorch 2.11 inside a post hook of the accumulator; arena_allocator_test.cc checks
// the verdicts. "uses" is storage().use_count() of the parameter's gradient.
//
//   gradient                                              uses     verdict
//   Conv2d (channels_last too), Embedding, LayerNorm,
//     BatchNorm, LSTM, w_hh of a GRU                      2        in place
//   Linear, w_ih of a GRU, MultiheadAttention, p.t()      3        in place: the input is a view
//   a weight that two layers share                        2        in place
//   p of p.sum(), p of cat along dim 1                    1        in place: autograd has cloned
//   p + q                                                 1, 2     in place: p is cloned
//   p.view + q.view                                       3, 4     copy
//   x + position.view, x's node has not run               3, 4     copy
//   x + position.view, x's node has run                   3        in place: the input is a view
//   cat along dim 0, stack                                4        copy: parts of one block
//   a tensor hook keeps the gradient, or a view of it     1        in place: autograd has cloned
//   a tensor hook keeps gradient.detach()                 3        copy
//   backward(g) of p.view, and the user keeps g           3        copy
//   added to an existing gradient                         1        in place
//   added to gradients of p.view + q.view                 2        copy
//   create_graph                                          1        in place: autograd has cloned
#ifndef DDP_REDUCER_ARENA_GRADIENT_BLOCK_H_
#define DDP_REDUCER_ARENA_GRADIENT_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "ddp/comm/arena/arena.h"

namespace ddp::internal {

// Returns the offset of the block of `arena` that `gradient` alone fills. Returns nullopt when the
// gradient must be copied:
//   - it is no dense, strided CPU tensor that begins at a block's start and has the block's size;
//   - a tensor besides `gradient` and `input` uses the storage;
//   - the storage is shared by other means (lazy copies), or the values are not the stored ones
//     (the conjugate and negative bits).
// `gradient` is the parameter's, and `input` is the gradient that a post hook of the parameter's
// accumulator has received. The answer holds only during the hook. Two gradients may each be alone
// at different times in one block, so the caller also needs Arena::Claim().
// Thread: that of the hook. Free of allocation and of ATen dispatch.
inline std::optional<uint64_t> SoleBlockOf(const Arena& arena, const at::Tensor& gradient,
                                           const at::Tensor& input) {
  if (!gradient.device().is_cpu() || gradient.layout() != at::kStrided || gradient.is_conj() ||
      gradient.is_neg() || !gradient.is_non_overlapping_and_dense()) {
    return std::nullopt;
  }
  const c10::StorageImpl* const storage = gradient.storage().unsafeGetStorageImpl();
  const at::DataPtr& data = storage->data_ptr();
  if (data.get() != data.get_context()) return std::nullopt;
  const std::optional<uint64_t> block =
      gradient.storage_offset() == 0 ? arena.BlockAt(data.get(), gradient.nbytes()) : std::nullopt;
  if (!block.has_value()) return std::nullopt;

  size_t own_uses = 1;  // of `gradient`
  if (input.defined() && input.layout() == at::kStrided && !input.is_same(gradient) &&
      input.storage().unsafeGetStorageImpl() == storage) {
    if (input.use_count() > 1) return std::nullopt;
    ++own_uses;
    if (const auto* view = torch::autograd::impl::get_view_autograd_meta(input)) {
      // One record of the base serves both directions, or each direction has its own.
      const bool two = view->has_bw_view() && view->has_fw_view() && !view->shared_view_info();
      const at::Tensor& base =
          view->has_bw_view() ? view->get_backward_view().base_ : view->get_forward_view().base_;
      if (two && !view->get_forward_view().base_.is_same(base)) return std::nullopt;
      if (base.use_count() > (two ? 2 : 1)) return std::nullopt;
      ++own_uses;
    }
  }
  return gradient.storage().use_count() <= own_uses ? block : std::nullopt;
}

}  // namespace ddp::internal

#endif  // DDP_REDUCER_ARENA_GRADIENT_BLOCK_H_
