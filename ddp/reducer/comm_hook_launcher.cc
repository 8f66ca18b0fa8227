#include "ddp/reducer/comm_hook_launcher.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {

void CommHookLauncher::Register(std::string name, CommHookRounds rounds) {
  name_ = std::move(name);
  rounds_ = std::move(rounds);
  calls_.clear();
}

void CommHookLauncher::SetPlan(const BucketPlan& plan) {
  plan_ = plan;
  calls_.clear();
}

void CommHookLauncher::MakeCalls() {
  const int count = static_cast<int>(plan_.buckets().size());
  for (int b = 0; b < count; ++b) {
    GradBucket::Contents contents{.index = b, .is_last = b + 1 == count};
    for (const int index : plan_.buckets()[b].parameters) {
      contents.parameters.push_back(parameters_[index]);
      contents.names.push_back(parameter_names_[index]);
    }
    Call call{.argument = std::make_unique<GradBucket>(std::move(contents))};
    for (int round = 0; round < rounds(); ++round) call.names.push_back(NameOfRound(b, round));
    calls_.push_back(std::move(call));
  }
}

std::string CommHookLauncher::NameOfRound(int bucket, int round) const {
  std::vector<std::string> names;
  for (const int index : plan_.buckets()[bucket].parameters) {
    names.push_back(parameter_names_[index]);
  }
  const std::string call =
      rounds() == 1 ? "the comm hook"
                    : absl::StrCat("round ", round + 1, " of the comm hook \"", name_, "\"");
  return absl::StrCat(call, ", called for gradient bucket ", bucket, " (", NameList(names), ")");
}

void CommHookLauncher::Guard(int bucket, int round, const std::function<void()>& function) const {
  try {
    function();
  } catch (...) {
    on_error_(calls_[bucket].names[round]);
    throw;
  }
}

void CommHookLauncher::Start(int bucket, at::Tensor buffer) {
  if (calls_.empty()) MakeCalls();
  Call& call = calls_[bucket];
  Guard(bucket, 0, [&] {
    call.argument->set_buffer(std::move(buffer));
    call.future = rounds_.first(*call.argument);
    if (!call.future) throw ReductionError("it returned no future");
  });
}

void CommHookLauncher::NextRound(int bucket, int round, Communicator& communicator) {
  Await(bucket, round - 1, communicator);
  Call& call = calls_[bucket];
  Guard(bucket, round, [&] {
    const c10::IValue former = call.future->value();
    call.former.push_back(call.future);
    call.future = rounds_.further[static_cast<size_t>(round) - 1](*call.argument, former);
    if (!call.future) throw ReductionError("it returned no future");
  });
}

void CommHookLauncher::Await(int bucket, int round, Communicator& communicator) {
  Guard(bucket, round, [&] {
    const Call& call = calls_[bucket];
    communicator.WaitFuture(call.future, {call.argument->buffer()}, call.names[round].c_str());
  });
}

void CommHookLauncher::Wait(int bucket, Communicator& communicator) {
  const Call& call = calls_[bucket];
  communicator.WaitFuture(call.future, {call.argument->buffer()},
                          {"the comm hook's result for gradient bucket", bucket});
}

at::Tensor CommHookLauncher::WaitForResult(int bucket, Communicator& communicator) {
  Await(bucket, rounds() - 1, communicator);
  const Call& call = calls_[bucket];
  return CheckedHookResult(*call.argument, call.future->constValue());
}

void CommHookLauncher::EndPass(bool release_buffers) {
  if (release_buffers) calls_.clear();
  for (Call& call : calls_) {
    call.future.reset();
    call.former.clear();
  }
}

}  // namespace ddp::internal
