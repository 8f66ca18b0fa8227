#include "ddp/common/grad_bucket.h"

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_complex.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/name_list.h"

namespace ddp {
namespace {

using internal::NameList;

// The largest number of names in one message.
constexpr size_t kNames = 8;

std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream text;
  text << "a " << (tensor.is_sparse() ? "sparse " : "") << "tensor of shape " << tensor.sizes()
       << ", " << tensor.scalar_type() << ", on " << tensor.device();
  return text.str();
}

bool Alike(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.sizes() == b.sizes() && a.layout() == b.layout() &&
         a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

std::string DescribeBucket(const GradBucket& bucket) {
  return absl::StrCat("gradient bucket ", bucket.index(), " (", NameList(bucket.names(), kNames),
                      ")");
}

at::Tensor PartOf(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset,
                  int64_t count) {
  at::Tensor part = flat.narrow(0, offset, count);
  if (parameter.is_complex()) part = at::view_as_complex(part.view({count / 2, 2}));
  return parameter.is_non_overlapping_and_dense()
             ? part.as_strided(parameter.sizes(), parameter.strides())
             : part.view(parameter.sizes());
}

}  // namespace

GradBucket::GradBucket(Contents contents) : contents_(std::move(contents)) {}

void GradBucket::set_buffer(at::Tensor buffer) { contents_.buffer = std::move(buffer); }

const std::vector<at::Tensor>& GradBucket::gradients() const {
  const at::Tensor& buffer = contents_.buffer;
  if (gradients_of_.is_same(buffer)) return gradients_;
  gradients_.clear();
  gradients_of_ = buffer;
  if (buffer.layout() != at::kStrided) {
    gradients_.push_back(buffer);
    return gradients_;
  }
  const at::NoGradGuard no_grad;
  int64_t offset = 0;
  for (const at::Tensor& parameter : contents_.parameters) {
    const int64_t count = parameter.numel() * (parameter.is_complex() ? 2 : 1);
    gradients_.push_back(PartOf(buffer, parameter, offset, count));
    offset += count;
  }
  return gradients_;
}

namespace internal {

at::Tensor TensorOf(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  std::string came = value.tagKind();
  if (value.isTensorList()) {
    const std::vector<at::Tensor> tensors = value.toTensorVector();
    if (tensors.size() == 1) return tensors.front();
    came = absl::StrCat("a list of ", tensors.size(), " tensors");
  }
  throw ReductionError(
      absl::StrCat("a future gave ", came, " where a tensor, or a list of one, was expected"));
}

at::Tensor CheckedHookResult(const GradBucket& bucket, const c10::IValue& value) {
  at::Tensor result;
  try {
    result = TensorOf(value);
  } catch (const ReductionError& error) {
    throw ReductionError(absl::StrCat("the comm hook's result for ", DescribeBucket(bucket), ": ",
                                      error.what_without_backtrace()));
  }
  if (Alike(result, bucket.buffer())) return result;
  throw ReductionError(absl::StrCat("the comm hook's result for ", DescribeBucket(bucket), " is ",
                                    Describe(result), "; it must be like the bucket's buffer, ",
                                    Describe(bucket.buffer())));
}

}  // namespace internal
}  // namespace ddp
