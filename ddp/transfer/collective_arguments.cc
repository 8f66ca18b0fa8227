#include "ddp/transfer/collective_arguments.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

using Kind = Collective::Kind;
using Tensors = std::vector<at::Tensor>;

// The checks of one call; `what` is the call's name.
class Checks {
 public:
  Checks(const CollectiveCaller& caller, std::string what)
      : caller_(caller), what_(std::move(what)) {}

  [[noreturn]] void Fail(const std::string& reason) const {
    throw ConfigurationError(absl::StrCat("rank ", caller_.rank, ": ", what_, ": ", reason));
  }

  // Checks a tensor that the call reads or writes.
  void Tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) Fail("a tensor is undefined");
    if (tensor.layout() != at::kStrided) {
      Fail("a tensor is sparse. Only all_reduce takes those, of layout COO");
    }
    AnyLayout(tensor);
  }

  void AnyLayout(const at::Tensor& tensor) {
    if (caller_.device.has_value() && tensor.device() != *caller_.device) {
      Fail(absl::StrCat("a tensor is on ", tensor.device().str(), ". This group's tensors are on ",
                        caller_.device->str(), " (ProcessGroup::device())"));
    }
    if (!first_.defined()) first_ = tensor;
    if (tensor.scalar_type() != first_.scalar_type() || tensor.device() != first_.device()) {
      Fail(absl::StrCat("the tensors differ: ", c10::toString(first_.scalar_type()), " on ",
                        first_.device().str(), " and ", c10::toString(tensor.scalar_type()), " on ",
                        tensor.device().str()));
    }
  }

  void Written(const at::Tensor& tensor) {
    Tensor(tensor);
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      Fail(
          "a tensor that is written has several elements at one address, as expand() makes it. "
          "Pass a clone()");
    }
  }

  void Rank(int rank) const {
    if (rank < 0 || rank >= caller_.size) {
      Fail(absl::StrCat("there is no rank ", rank, " in a group of ", caller_.size));
    }
  }

  void Operation(ReduceOp op, const at::Tensor& tensor) const {
    const at::ScalarType type = tensor.scalar_type();
    const bool sum = op == ReduceOp::kSum || op == ReduceOp::kAverage;
    if (tensor.layout() != at::kStrided && !sum) Fail("sparse tensors are summed or averaged only");
    if (tensor.is_complex() && !sum) Fail("complex numbers are summed or averaged only");
    const bool integral = c10::isIntegralType(type, /*includeBool=*/true);
    if (op == ReduceOp::kAverage && integral) {
      Fail(absl::StrCat("an average of ", c10::toString(type),
                        " would be cut off. Sum, then divide in a floating-point type"));
    }
    const std::string refusal = caller_.refusal == nullptr ? "" : caller_.refusal(op, type);
    if (!refusal.empty()) Fail(refusal);
    if (IsBitwise(op) && !integral) {
      Fail(absl::StrCat(c10::toString(type), " has no bitwise operations. Integers and bool have"));
    }
  }

 private:
  const CollectiveCaller& caller_;
  const std::string what_;
  at::Tensor first_;
};

bool IsPlain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

int64_t Count(const Tensors& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0},
      [](int64_t sum, const at::Tensor& tensor) { return sum + tensor.numel(); });
}

// Returns the tensors as one one-dimensional tensor when they are adjacent in memory; else
// undefined.
at::Tensor OneBlock(const Tensors& tensors) {
  const at::Tensor* first = nullptr;
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (!IsPlain(tensor)) return at::Tensor();
    if (first == nullptr) first = &tensor;
    if (!tensor.is_alias_of(*first) || tensor.storage_offset() != first->storage_offset() + count) {
      return at::Tensor();
    }
    count += tensor.numel();
  }
  if (first == nullptr) return at::Tensor();
  return first->as_strided({count}, {1}, first->storage_offset());
}

at::Tensor ForReading(const Tensors& tensors) {
  if (at::Tensor block = OneBlock(tensors); block.defined()) return block;
  Tensors flat;
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.resolve_conj().resolve_neg().reshape({-1}));
  }
  return at::cat(flat).contiguous();
}

// The memory into which a collective writes the values of `tensors`, and the step that copies them
// there. `old`: true when the present values matter.
struct Target {
  at::Tensor flat;
  std::function<void()> finish;
};

Target ForWriting(const Tensors& tensors, bool old) {
  if (at::Tensor block = OneBlock(tensors); block.defined()) return {std::move(block), nullptr};
  Target target;
  // ForReading() copies, because the tensors are not one block.
  target.flat = old ? ForReading(tensors) : at::empty({Count(tensors)}, tensors.front().options());
  target.finish = [flat = target.flat, tensors] {
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  };
  return target;
}

// Returns a last step that divides the sum by the number of ranks.
std::function<void()> Divide(std::function<void()> finish, const Tensors& outputs, int size) {
  return [finish = std::move(finish), outputs, size] {
    if (finish) finish();
    for (const at::Tensor& output : outputs) output.div_(size);
  };
}

// Replaces an input that overlaps the output by a copy, because ranks read and write at the same
// time.
void KeepApart(Collective& collective) {
  if (collective.input.numel() == 0 || !collective.input.is_alias_of(collective.output)) return;
  if (at::get_overlap_status(collective.output, collective.input) != at::MemOverlapStatus::No) {
    collective.input = collective.input.clone();
  }
}

void CheckList(const Checks& checks, const CollectiveCaller& caller, const Tensors& list,
               int64_t part, const char* which) {
  const bool one = list.size() == 1;
  if (!one && list.size() != static_cast<size_t>(caller.size)) {
    checks.Fail(absl::StrCat(list.size(), " ", which, " tensors for ", caller.size,
                             " ranks. Pass one tensor, or one for each rank"));
  }
  for (const at::Tensor& tensor : list) {
    const int64_t expected = one ? part * caller.size : part;
    if (tensor.numel() == expected) continue;
    checks.Fail(absl::StrCat("the ", which, " has ", tensor.numel(), " elements, and needs ",
                             expected, one ? absl::StrCat(": ", part, " for each rank") : ""));
  }
}

PreparedCollective PrepareMessage(Checks& checks, int rank, int peer, int tag) {
  checks.Rank(peer);
  if (peer == rank) checks.Fail("a rank has no messages for itself");
  if (tag < 0) checks.Fail(absl::StrCat("tag ", tag, " is negative"));
  return {};
}

}  // namespace

PreparedCollective PrepareAllReduce(const CollectiveCaller& caller, const at::Tensor& tensor,
                                    ReduceOp op) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "all_reduce");
  PreparedCollective prepared{.collective = {.op = op}, .finish = {}, .outputs = {tensor}};
  if (tensor.defined() && tensor.is_sparse()) {
    checks.AnyLayout(tensor);
    prepared.collective.output = tensor;
  } else {
    checks.Written(tensor);
    Target target = ForWriting({tensor}, /*old=*/true);
    // Messages show the tensor's own shape.
    prepared.collective.output = target.finish ? target.flat.view(tensor.sizes()) : tensor;
    prepared.finish = std::move(target.finish);
  }
  checks.Operation(op, tensor);
  if (op == ReduceOp::kAverage && caller.size > 1) {
    prepared.finish = Divide(std::move(prepared.finish), prepared.outputs, caller.size);
  }
  return prepared;
}

PreparedCollective PrepareBroadcast(const CollectiveCaller& caller, const at::Tensor& tensor,
                                    int root) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "broadcast");
  checks.Rank(root);
  if (caller.rank == root) {
    checks.Tensor(tensor);
  } else {
    checks.Written(tensor);
  }
  Target target = ForWriting({tensor}, /*old=*/true);
  const bool copied = target.finish != nullptr;
  if (caller.rank == root) target.finish = nullptr;
  return {.collective = {.kind = Kind::kBroadcast,
                         .root = root,
                         .output = copied ? target.flat.view(tensor.sizes()) : tensor},
          .finish = std::move(target.finish),
          .outputs = {tensor}};
}

PreparedCollective PrepareAllGather(const CollectiveCaller& caller, const Tensors& outputs,
                                    const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "all_gather");
  checks.Tensor(input);
  for (const at::Tensor& output : outputs) checks.Written(output);
  CheckList(checks, caller, outputs, input.numel(), "output");
  Target target = ForWriting(outputs, /*old=*/false);
  PreparedCollective prepared{
      .collective = {.kind = Kind::kAllGather, .output = target.flat, .input = ForReading({input})},
      .finish = std::move(target.finish),
      .outputs = outputs};
  KeepApart(prepared.collective);
  return prepared;
}

PreparedCollective PrepareReduceScatter(const CollectiveCaller& caller, const at::Tensor& output,
                                        const Tensors& inputs, ReduceOp op) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "reduce_scatter");
  checks.Written(output);
  for (const at::Tensor& input : inputs) checks.Tensor(input);
  checks.Operation(op, output);
  CheckList(checks, caller, inputs, output.numel(), "input");
  Target target = ForWriting({output}, /*old=*/false);
  PreparedCollective prepared{.collective = {.kind = Kind::kReduceScatter,
                                             .op = op,
                                             .output = target.flat,
                                             .input = ForReading(inputs)},
                              .finish = std::move(target.finish),
                              .outputs = {output}};
  KeepApart(prepared.collective);
  if (op == ReduceOp::kAverage && caller.size > 1) {
    prepared.finish = Divide(std::move(prepared.finish), prepared.outputs, caller.size);
  }
  return prepared;
}

PreparedCollective PrepareAllToAll(const CollectiveCaller& caller, const at::Tensor& output,
                                   const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "all_to_all");
  checks.Tensor(input);
  checks.Written(output);
  if (input.dim() == 0 || input.size(0) % caller.size != 0) {
    checks.Fail(absl::StrCat("the input's first dimension must be a multiple of ", caller.size,
                             ", the number of ranks. For other sizes name those of the parts"));
  }
  if (input.numel() != output.numel()) {
    checks.Fail(absl::StrCat("the input has ", input.numel(), " elements, and the output ",
                             output.numel()));
  }
  Target target = ForWriting({output}, /*old=*/false);
  PreparedCollective prepared{
      .collective = {.kind = Kind::kAllToAll, .output = target.flat, .input = ForReading({input})},
      .finish = std::move(target.finish),
      .outputs = {output}};
  KeepApart(prepared.collective);
  return prepared;
}

PreparedCollective PrepareAllToAllSized(const CollectiveCaller& caller, const Tensors& outputs,
                                        const Tensors& inputs) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, "all_to_all");
  if (outputs.size() != static_cast<size_t>(caller.size) || inputs.size() != outputs.size()) {
    checks.Fail(absl::StrCat(outputs.size(), " outputs and ", inputs.size(), " inputs for ",
                             caller.size, " ranks. Pass one of each for each rank"));
  }
  for (const at::Tensor& input : inputs) checks.Tensor(input);
  for (const at::Tensor& output : outputs) checks.Written(output);
  Target target = ForWriting(outputs, /*old=*/false);
  PreparedCollective prepared{.collective = {.kind = Kind::kAllToAllSized,
                                             .output = target.flat,
                                             .input = ForReading(inputs)},
                              .finish = std::move(target.finish),
                              .outputs = outputs};
  for (const at::Tensor& output : outputs) {
    prepared.collective.output_sizes.push_back(output.numel());
  }
  for (const at::Tensor& input : inputs) prepared.collective.input_sizes.push_back(input.numel());
  KeepApart(prepared.collective);
  return prepared;
}

PreparedCollective PrepareSend(const CollectiveCaller& caller, const at::Tensor& tensor, int peer,
                               int tag) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, absl::StrCat("send to rank ", peer));
  PreparedCollective prepared = PrepareMessage(checks, caller.rank, peer, tag);
  checks.Tensor(tensor);
  prepared.collective.output = ForReading({tensor});
  prepared.outputs = {tensor};
  return prepared;
}

PreparedCollective PrepareReceive(const CollectiveCaller& caller, const at::Tensor& tensor,
                                  int peer, int tag) {
  const at::NoGradGuard no_grad;
  Checks checks(caller, absl::StrCat("recv from rank ", peer));
  PreparedCollective prepared = PrepareMessage(checks, caller.rank, peer, tag);
  checks.Written(tensor);
  Target target = ForWriting({tensor}, /*old=*/false);
  prepared.collective.output = std::move(target.flat);
  prepared.finish = std::move(target.finish);
  prepared.outputs = {tensor};
  return prepared;
}

void MarkWritten(const PreparedCollective& prepared, int rank) {
  const Collective& collective = prepared.collective;
  if (collective.kind == Kind::kBroadcast && collective.root == rank) return;
  for (const at::Tensor& output : prepared.outputs) {
    if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  }
}

Tensors SplitForRanks(const CollectiveCaller& caller, const at::Tensor& tensor,
                      const std::vector<int64_t>& sizes) {
  Checks checks(caller, "all_to_all");
  checks.Tensor(tensor);
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n < 0; });
  const int64_t rows = tensor.dim() == 0 ? -1 : tensor.size(0);
  if (sizes.size() != static_cast<size_t>(caller.size) || negative ||
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != rows) {
    checks.Fail(absl::StrCat("the sizes [", absl::StrJoin(sizes, ", "), "] do not split a first ",
                             "dimension of ", rows, " between ", caller.size, " ranks"));
  }
  Tensors parts;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    parts.push_back(tensor.narrow(0, begin, size));
    begin += size;
  }
  return parts;
}

}  // namespace ddp::internal
