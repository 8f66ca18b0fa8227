// Training loops of different lengths. A rank without inputs takes part in the collectives of the
// other ranks, until no rank has inputs.
//
//   ddp::Join join({&model, &optimizer});
//   while (auto batch = next_batch()) { ...train as always... }
//   join.finish();
//
// The same in one call: ddp::join({&model, &optimizer}, {}, [&] { ...the loop... });
//
// How a Join works. A *joinable* is an object with collectives in every iteration, such as a model.
// Each group of collectives is an *event*, which the joinable names by a small number. On a rank
// with inputs, the joinable calls notify(event) before each such group. notify() is one all-reduce
// of one integer per rank. A rank in finish() has *joined*: it answers with "joined", and then
// calls the hook of the same joinable. The hook takes part in the event with neutral values. A
// joined rank thus repeats exactly the collectives of the others, and every rank knows which ranks
// had inputs in each round.
#ifndef DDP_JOIN_H_
#define DDP_JOIN_H_

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {

class Join;
class ProcessGroup;

namespace internal {
class JoinCore;
struct JoinAnnouncement;
struct JoinVerdict;
}  // namespace internal

// Options of a Join. Names and defaults are those of PyTorch's Join. All ranks give equal options.
// The first collective of the Join compares them: every rank throws ConfigurationError when they
// differ. When `enable` differs, every rank throws CommunicationError after about a second.
struct JoinOptions {
  // When true, a sum over fewer ranks is still divided by the group's size: every input then has
  // the same weight over the whole run. When false, it is divided by the number of ranks with
  // inputs.
  bool divide_by_initial_world_size = true;

  // When false, the Join does nothing. For loops whose inputs are known to be even.
  bool enable = true;

  // When true, every rank throws as soon as some ranks have inputs and some have none.
  bool throw_on_early_termination = false;
};

// One event, as all ranks know it.
struct JoinRound {
  int event = 0;                  // the joinable's number for it
  std::vector<int> active_ranks;  // ranks with inputs, ascending, at least one

  int num_active() const { return static_cast<int>(active_ranks.size()); }
  // Returns the rank whose data is used where one rank's data is needed: buffers, the order of
  // buckets. The highest active rank, as for the state after the Join, and as in PyTorch.
  int source() const { return active_ranks.back(); }
};

// A joinable's actions on a rank that has joined. The Join owns it. Called on the thread of
// finish().
class JoinHook {
 public:
  virtual ~JoinHook() = default;

  // Runs when this rank has no inputs left, before the first main_hook(). Throws when the loop left
  // something unfinished that the other ranks wait for.
  virtual void on_join() {}

  // Takes part in the collectives of `round`, in the same order as the active ranks.
  virtual void main_hook(const JoinRound& round) {}

  // Runs once on every rank when all have joined, in the order of the joinables. May use
  // collectives. `last_joiner` is the rank that had inputs longest, the highest of several; its
  // state is the one to continue with. Rank 0 when no rank had any event.
  virtual void post_hook(bool is_last_joiner, int last_joiner) {}
};

// An object with collectives in every iteration. enter_join() and leave_join() tell it which Join
// is active.
class Joinable {
 public:
  virtual ~Joinable() = default;

  // Makes a hook for one Join. Called when the Join begins.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;

  // Returns the group of the joinable's collectives: the same for all joinables of a Join. Null: no
  // collectives except those of the hooks.
  virtual std::shared_ptr<ProcessGroup> join_process_group() = 0;

  // Begins the use under `join`, which is valid until leave_join(). Until then, on every rank with
  // inputs, call join->notify(*this, event) before each group of collectives.
  virtual void enter_join(Join* join) = 0;
  virtual void leave_join() = 0;

  // Names for messages: of the joinable, and of an event with its article.
  virtual std::string join_name() const { return ""; }
  virtual std::string join_event_name(int event) const { return "event " + std::to_string(event); }

  // Returns true while this rank still has to start collectives of the last announced event. Joined
  // ranks are then busy with that event, so no other event may be announced.
  virtual bool in_join_event() const { return false; }

 private:
  friend class Join;
  bool in_join_ = false;
};

// An argument of a Join: a pointer to one of these.
// - A Joinable.
// - An object with a function joinable(), such as a DistributedDataParallel. The object may move
//   while the Join lives.
// - A LibTorch optimizer. Its step has no collectives. At the end of the Join, every rank gets the
//   optimizer state of the rank that had inputs longest, together with that rank's parameters.
//   Without this, a rank that joined early would continue with stale momentum.
class JoinableRef {
 public:
  JoinableRef(Joinable* joinable) : joinable_(std::shared_ptr<void>(), joinable) {}
  JoinableRef(torch::optim::Optimizer* optimizer);
  template <typename T>
  requires requires(T& object) {
    { object.joinable() } -> std::same_as<Joinable*>;
  }
  JoinableRef(T* object) : JoinableRef(object->joinable()) {}

  Joinable* get() const { return joinable_.get(); }

 private:
  std::shared_ptr<Joinable> joinable_;  // owned for an optimizer
};

// A scope around one training loop; see the top of this file. All ranks make one, with the same
// joinables in the same order. The joinables must outlive the Join.
//
// An exception that leaves the scope is reported to the other ranks, so that none waits for this
// one. Leaving the scope without finish() and without an exception is a programming error. The
// destructor logs it, and every rank throws: this one at its next synchronized forward, Join or
// collective.
//
// One backward may go through one joinable only, because a rank without inputs takes part in one
// reduction at a time. A backward through two models throws ReductionError on all ranks. Examples:
// the sum of their losses, or one model's output as the other's input. Call backward once for each
// model, or put both as submodules into one module with one DistributedDataParallel.
//
// Thread-compatible. Call notify() on the thread of the loop or of its backward, never on two at
// once.
class Join {
 public:
  // Event numbers are 0 to kMaxEvents - 1.
  static constexpr int kMaxEvents = 64;

  // Throws ConfigurationError: no joinable, no group, more than one group, or a joinable that is
  // under a Join already. Throws as ProcessGroup::ensure_usable() when a failure is known.
  explicit Join(const std::vector<JoinableRef>& joinables, const JoinOptions& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Announces an event. Collective; for joinables, on a rank with inputs. Blocks until every rank
  // calls notify() or finish().
  //
  // Throws ReductionError on all ranks when the ranks announce different events, or when some ranks
  // have no inputs and throw_on_early_termination is set. Throws ConfigurationError on all ranks
  // when the options or the number of joinables differ. Throws ReductionError on this rank when a
  // failure has ended the Join, and, after a report to the others, when another joinable is in an
  // event. Throws what a collective throws.
  JoinRound notify(const Joinable& joinable, int event);

  // Ends the loop. Collective. Takes part in the events of the other ranks, and returns when all
  // ranks have called finish() and the post hooks have run. A second call does nothing.
  //
  // Throws ReductionError as notify() does, and what a collective throws. Throws what a hook
  // throws, after a report to the others. When the Join has ended early (an exception or
  // abandon()), throws ReductionError without a collective: the models were not made equal.
  void finish();

  // Ends the Join on this rank without finish(), and reports `reason` to the others. Does nothing
  // when the Join has ended.
  void abandon(const std::string& reason);

  const JoinOptions& options() const { return options_; }
  const std::shared_ptr<ProcessGroup>& process_group() const { return group_; }

 private:
  std::unique_ptr<internal::JoinCore> MakeCore() const;
  internal::JoinVerdict Exchange(const std::optional<internal::JoinAnnouncement>& announcement);
  void CheckNoOtherEvent(const internal::JoinAnnouncement& announcement);
  void Shadow();
  void CheckIncarnation();
  void Leave(const std::string& failure = "");

  const std::vector<JoinableRef> references_;
  const std::vector<Joinable*> joinables_;  // of references_
  const JoinOptions options_;
  const int exceptions_at_start_;
  int64_t incarnation_ = 0;  // of the group, at the beginning
  std::shared_ptr<ProcessGroup> group_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;  // in the order of joinables_
  std::unique_ptr<internal::JoinCore> core_;      // null: not enabled
  bool ended_ = false;
  std::string failure_;  // the reason why it ended early; empty: none
};

// Runs `loop` under a Join and then calls finish(). An exception that leaves the loop is reported
// to the other ranks.
void join(const std::vector<JoinableRef>& joinables, const JoinOptions& options,
          const std::function<void()>& loop);

}  // namespace ddp

#endif  // DDP_JOIN_H_
