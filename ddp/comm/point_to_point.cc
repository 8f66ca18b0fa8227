#include "ddp/comm/point_to_point.h"

#include <array>
#include <functional>
#include <list>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <xxhash.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/comm/message_thread.h"
#include "ddp/common/error.h"

namespace ddp::internal {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor Bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

at::Tensor HeaderOf(const at::Tensor& tensor) {
  return at::tensor({static_cast<int64_t>(tensor.scalar_type()), tensor.numel()}, at::kLong);
}

std::string Describe(const at::Tensor& header) {
  const int64_t* const fields = header.const_data_ptr<int64_t>();
  return absl::StrCat(fields[1], fields[1] == 1 ? " element of " : " elements of ",
                      c10::toString(static_cast<at::ScalarType>(fields[0])));
}

WorkPtr SendTensor(c10d::Backend& backend, const at::Tensor& tensor, int peer, int tag) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend.send(tensors, peer, tag);
}

WorkPtr ReceiveTensor(c10d::Backend& backend, const at::Tensor& tensor, int peer, int tag) {
  std::vector<at::Tensor> tensors = {tensor};
  return backend.recv(tensors, peer, tag);
}

}  // namespace

// Returns a future that is complete when both works are; `second` may be null. `check` runs between
// them, and throws when the second one will never be complete.
WorkFuture PointToPoint::FutureOfBoth(const WorkPtr& first, const WorkPtr& second,
                                      std::function<void()> check, const at::Tensor& tensor) {
  const WorkFuture header = OwnFutureOf(*first);
  const WorkFuture body = header && second ? OwnFutureOf(*second) : nullptr;
  if (!header || (second && !body)) {
    std::list<MessageThread::Part> parts = {{.work = first, .check = std::move(check)}};
    if (second) parts.push_back({.work = second});
    return thread_->Add(std::move(parts), tensor);
  }
  const WorkFuture checked = Then(header, std::move(check), {tensor});
  if (!body) return checked;
  const WorkFuture both = checked->thenAsync(
      [body](c10::ivalue::Future& done) {
        (void)done.value();  // throws its error
        return body;
      },
      body->elementType());
  return Then(both, nullptr, {tensor});
}

PointToPoint::PointToPoint(c10::intrusive_ptr<c10d::Backend> backend, bool matches_tags)
    : backend_(std::move(backend)),
      matches_tags_(matches_tags),
      thread_(std::make_shared<MessageThread>()) {}

PointToPoint::Message PointToPoint::WithoutHeader(const WorkPtr& work, const at::Tensor& tensor) {
  return {.future = FutureOfWork(work, {tensor}), .work = work};
}

PointToPoint::Tags PointToPoint::TagsOf(const at::Tensor& tensor, int tag, int64_t number) {
  const auto hash = [](const std::array<int64_t, 4>& numbers) {
    return static_cast<int>(XXH3_64bits(numbers.data(), sizeof(numbers)) & 0x3fffffff);
  };
  return {.header = hash({tag, number, -1, 0}),
          .body = hash({tag, number, static_cast<int64_t>(tensor.scalar_type()), tensor.numel()})};
}

PointToPoint::Message PointToPoint::Send(const at::Tensor& tensor, int peer, int tag) {
  if (!matches_tags_) {
    if (tensor.numel() == 0) return {.future = CompleteFuture({tensor}), .work = nullptr};
    return WithoutHeader(SendTensor(*backend_, tensor, peer, tag), tensor);
  }
  const Tags tags = TagsOf(tensor, tag, sent_[{peer, tag}]++);
  const at::Tensor header = HeaderOf(tensor);
  const WorkPtr first = SendTensor(*backend_, header, peer, tags.header);
  WorkPtr second;
  if (tensor.numel() > 0) second = SendTensor(*backend_, Bytes(tensor), peer, tags.body);
  return {.future = FutureOfBoth(first, second, nullptr, tensor), .work = nullptr};
}

PointToPoint::Message PointToPoint::Receive(const at::Tensor& tensor, int peer, int tag) {
  if (!matches_tags_) {
    if (tensor.numel() == 0) return {.future = CompleteFuture({tensor}), .work = nullptr};
    return WithoutHeader(ReceiveTensor(*backend_, tensor, peer, tag), tensor);
  }
  const Tags tags = TagsOf(tensor, tag, received_[{peer, tag}]++);
  const at::Tensor expected = HeaderOf(tensor);
  const at::Tensor header = at::empty({2}, at::kLong);
  const WorkPtr first = ReceiveTensor(*backend_, header, peer, tags.header);
  WorkPtr second;
  if (tensor.numel() > 0) second = ReceiveTensor(*backend_, Bytes(tensor), peer, tags.body);
  const auto check = [header, expected, peer] {
    if (at::equal(header, expected)) return;
    throw CommunicationError(absl::StrCat("rank ", peer, " sends ", Describe(header),
                                          ", and this rank receives ", Describe(expected)));
  };
  return {.future = FutureOfBoth(first, second, check, tensor), .work = nullptr};
}

}  // namespace ddp::internal
