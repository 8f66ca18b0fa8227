#include "ddp/rpc/meeting_point.h"

#include <tuple>
#include <utility>

#include "ddp/rpc/value.h"

namespace ddp::rpc::internal {
namespace {

std::string NameOf(Meeting meeting) {
  switch (meeting) {
    case Meeting::kInit:
      return "init()";
    case Meeting::kBarrier:
      return "barrier()";
    case Meeting::kShutdown:
      return "shutdown()";
    case Meeting::kEnd:
      return "the end of shutdown()";
  }
  return "";
}

}  // namespace

c10::IValue Returned(c10::IValue value) {
  return c10::ivalue::Tuple::create(c10::IValue(true), std::move(value));
}

c10::IValue Failed(int rank, const std::string& message, const std::string& stack) {
  return Value<std::tuple<bool, int, std::string, std::string>>::To({false, rank, message, stack});
}

MeetingPoint::FuturePtr MeetingPoint::Arrive(Meeting meeting, const std::string& worker, int size) {
  auto mine = c10::make_intrusive<Future>(c10::AnyType::get());
  std::vector<FuturePtr> all;
  c10::IValue answer = Returned(c10::IValue());
  {
    MutexLock lock(mutex_);
    if (arrived_.empty()) {
      meeting_ = meeting;
      first_ = worker;
    } else if (meeting != meeting_ && mixed_.empty()) {
      mixed_ = "worker " + first_ + " is in " + NameOf(meeting_) + " while worker " + worker +
               " is in " + NameOf(meeting) + ": all workers must call them in the same order";
    }
    arrived_.push_back(mine);
    if (!mixed_.empty()) answer = Failed(-1, mixed_, mixed_);
    if (!mixed_.empty() || static_cast<int>(arrived_.size()) == size) all.swap(arrived_);
  }
  for (const FuturePtr& future : all) future->markCompleted(answer);
  return mine;
}

MeetingPoint::FuturePtr MeetingPoint::AddWatcher() {
  auto watcher = c10::make_intrusive<Future>(c10::AnyType::get());
  bool ended = false;
  {
    MutexLock lock(mutex_);
    ended = watches_ended_;
    if (!ended) watchers_.push_back(watcher);
  }
  if (ended) watcher->markCompleted(Returned(c10::IValue()));
  return watcher;
}

void MeetingPoint::EndWatches() {
  std::vector<FuturePtr> watchers;
  {
    MutexLock lock(mutex_);
    watches_ended_ = true;
    watchers.swap(watchers_);
  }
  for (const FuturePtr& watcher : watchers) watcher->markCompleted(Returned(c10::IValue()));
}

}  // namespace ddp::rpc::internal
