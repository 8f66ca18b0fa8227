// Training loops of different lengths: ranks that have no inputs left take part in the collectives
// of those that have, until the last one is through.
//
//   ddp::Join join({&model, &optimizer});
//   while (auto batch = next_batch()) { ...train as always... }
//   join.finish();
//
// or, in one piece, ddp::join({&model, &optimizer}, {}, [&] { ...the loop... });
//
// How it works. Before each group of collectives, a joinable on a rank with inputs calls notify()
// with a small number that says which group comes, its *event*. That is one all-reduce of as many
// integers as there are ranks. A rank that has joined, so is in finish(), answers with "joined" and
// calls the hook of the same joinable, which takes part in the group with neutral values. So only
// what really happens is shadowed, whatever the loop does in between, and every rank knows of every
// round which ranks had inputs.
#ifndef DDP_JOIN_H_
#define DDP_JOIN_H_

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/option.h"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace ddp {

class Join;
class ProcessGroup;

// Names and defaults are those of PyTorch's Join. All ranks give equal ones: the first collective
// of the Join compares them, and every rank throws ConfigurationError where they differ. Where
// `enable` differs, every rank throws CommunicationError after about a second.
struct JoinOptions {
  using Self = JoinOptions;

  // Sums over fewer ranks are still divided by the group's size, so that every input weighs the
  // same over the whole run. false: by the number of ranks that had inputs in that round.
  DDP_OPTION(divide_by_initial_world_size, bool) = true;

  // false: nothing is done. For loops whose inputs are known to be even.
  DDP_OPTION(enable, bool) = true;

  // The first time that some ranks have inputs and some have none, every rank throws.
  DDP_OPTION(throw_on_early_termination, bool) = false;
};

// One announced group of collectives: the same on every rank.
struct JoinRound {
  int event = 0;                  // what the joinable called it
  std::vector<int> active_ranks;  // ascending, at least one: those that have inputs

  int num_active() const { return static_cast<int>(active_ranks.size()); }
  // The rank whose data counts where one rank's does: buffers, the order of buckets. The highest,
  // as for the state after the Join, and as PyTorch chooses.
  int source() const { return active_ranks.back(); }
};

// What a joinable does on a rank that has joined. Belongs to one Join.
class JoinHook {
 public:
  virtual ~JoinHook() = default;

  // When this rank has no inputs left, before anything is shadowed. Throws if the loop left
  // something unfinished that the others wait for.
  virtual void on_join() {}

  // Takes part in the collectives that `round` announces, in the same order as the active ranks.
  virtual void main_hook(const JoinRound& round) {}

  // Once on every rank when all have joined, in the order of the joinables; may use collectives.
  // `last_joiner` is the rank that went on longest, the highest of several; its state is the one to
  // go on with. Rank 0 if no rank did anything.
  virtual void post_hook(bool is_last_joiner, int last_joiner) {}
};

// Something with collectives in every iteration. It learns of the Join it is under by enter_join().
class Joinable {
 public:
  virtual ~Joinable() = default;

  // A hook for one Join, called as the Join begins.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;

  // The ranks of its collectives; the same group for all joinables of one Join. Null: no
  // collectives but those of the hooks.
  virtual std::shared_ptr<ProcessGroup> join_process_group() = 0;

  // From here to leave_join(), on every rank that has inputs, each group of collectives starts with
  // join->notify(*this, event). `join` is valid until then.
  virtual void enter_join(Join* join) = 0;
  virtual void leave_join() = 0;

  // For messages: the joinable's own name, and an event's, with an article.
  virtual std::string join_name() const { return ""; }
  virtual std::string join_event_name(int event) const { return "event " + std::to_string(event); }

  // Whether collectives of the last announced event are still to be started by this rank. A rank
  // without inputs is then busy with that event, so nothing else may be announced.
  virtual bool in_join_event() const { return false; }

 private:
  friend class Join;
  bool in_join_ = false;
};

// The argument of a Join: an address.
// - Of a Joinable.
// - Of an object with a function joinable(). A DistributedDataParallel is such an object, and may
//   move while the Join lives.
// - Of a LibTorch optimizer. Its step has no collectives. At the end of the Join every rank gets
//   the optimizer state of the rank that went on longest, as it gets that rank's parameters:
//   without it, a rank that joined early would go on with stale momentum.
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

// See the top of this file. Its scope is the training loop; all ranks make one, of the same
// joinables in the same order.
//
// When an exception leaves the scope, the others are told, so that nobody waits for this rank.
// Leaving it without finish() and without an exception is a mistake in the program: it is logged,
// and every rank throws, this one at its next synchronized forward, Join or collective.
//
// One backward may go through one joinable only. A backward through two models, as of the sum of
// their losses or of one model's output in the other, throws ReductionError on all ranks: the
// second reduction would begin before the first is complete, and a rank without inputs takes part
// in one at a time. Call backward once for each model, or make both submodules of one module with
// one DistributedDataParallel.
//
// Thread-compatible; notify() is for the thread of the loop or its backward, never two at once. The
// joinables must outlive it.
class Join {
 public:
  // Events are below this.
  static constexpr int kMaxEvents = 64;

  // Throws ConfigurationError (no joinable, more than one group, a joinable that is under a Join
  // already) and PeerFailedError (news that this rank had not seen yet).
  explicit Join(const std::vector<JoinableRef>& joinables, const JoinOptions& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Collective; for joinables, on a rank with inputs. Blocks until every rank is here or in
  // finish(). Throws ReductionError on all ranks alike when they disagree about what comes, or some
  // have no inputs left and throw_on_early_termination is set; on this rank, after the others were
  // told, when another joinable is in an event; and what a collective throws.
  JoinRound notify(const Joinable& joinable, int event);

  // Collective; after the loop. Takes part in what the others still do, and returns when all are
  // here and the post hooks have run. Nothing happens in a second call.
  //
  // Throws ReductionError (as notify), what a collective throws, and what a hook throws, after the
  // others were told. Throws ReductionError, and is no collective, when the Join ended by an
  // exception before: the models were not made equal.
  void finish();

  // Instead of finish(): ends the Join on this rank and tells the others why. Nothing happens when
  // it has ended already.
  void abandon(const std::string& reason);

  const JoinOptions& options() const { return options_; }
  const std::shared_ptr<ProcessGroup>& process_group() const { return group_; }

 private:
  struct Announcement {
    int joinable = 0;
    JoinRound round;  // no active ranks: all have joined
  };

  int64_t CodeOf(const Joinable& joinable, int event) const;
  Announcement Exchange(int64_t code);
  int64_t Terms() const;
  [[noreturn]] void ThrowDifferentTerms(const std::vector<int64_t>& codes);
  void CheckNoOtherEvent(const Joinable& joinable, int event);
  std::string NameOf(size_t joinable) const;
  std::string Describe(int64_t code) const;
  std::string Disagreement(const std::vector<int64_t>& codes) const;
  [[noreturn]] void ThrowEarlyTermination(const JoinRound& round);
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
  int last_joiner_ = 0;
  bool ended_ = false;
  std::string failure_;  // that ended it; empty: none
};

// Runs `loop` under a Join and finishes it. An exception that leaves the loop is told to the others
// in its own words.
void join(const std::vector<JoinableRef>& joinables, const JoinOptions& options,
          const std::function<void()>& loop);

}  // namespace ddp

#endif  // DDP_JOIN_H_
