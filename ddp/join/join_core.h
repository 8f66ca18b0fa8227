#ifndef DDP_JOIN_JOIN_CORE_H_
#define DDP_JOIN_JOIN_CORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ddp::internal {

// The terms of a Join, on which all ranks must agree.
struct JoinTerms {
  bool divide_by_initial_world_size = true;
  bool throw_on_early_termination = false;
  int joinables = 1;

  friend bool operator==(const JoinTerms&, const JoinTerms&) = default;
};

// An event that a rank with inputs announces.
struct JoinAnnouncement {
  int joinable = 0;  // index among the joinables of the Join
  int event = 0;     // the joinable's own number, below JoinCore::kMaxEvents

  friend bool operator==(const JoinAnnouncement&, const JoinAnnouncement&) = default;
};

// The outcome of one exchange of a Join.
struct JoinVerdict {
  enum class Kind : uint8_t {
    kRound,             // the active ranks do `announcement`; joined ranks take part
    kAllJoined,         // no rank has inputs
    kDifferentJoins,    // an error on all ranks: their terms differ
    kDifferentEvents,   // an error on all ranks: ranks with inputs announced different events
    kEarlyTermination,  // an error on all ranks: throw_on_early_termination, and a rank has joined
  };

  Kind kind = Kind::kRound;
  JoinAnnouncement announcement;
  std::vector<int> active_ranks;  // the ranks with inputs, ascending
  std::string message;            // of an error
};

// The decisions of a Join: what an exchange of all ranks means, and what the errors say.
//
// Each rank sends one word: the event that it announces, or that it has joined, together with its
// terms. All ranks read the words of all ranks, and come to the same verdict. Joined ranks then
// repeat the collectives of the announced event.
//
// Pure: no collective, no tensor, no clock. Owned by a Join. Thread-compatible.
class JoinCore {
 public:
  // Events of a joinable are numbered from 0 to kMaxEvents - 1.
  static constexpr int kMaxEvents = 64;

  // The number of rounds on a joined rank at which Warning() warns.
  static constexpr int64_t kRoundsBeforeWarning = 1000;

  // Names for messages, of this rank's joinables and their events.
  struct Names {
    std::function<std::string(size_t joinable)> joinable;          // may return ""
    std::function<std::string(size_t joinable, int event)> event;  // with its article
  };

  JoinCore(int rank, int size, JoinTerms terms, Names names);

  // Returns the word of this rank. `announcement` is nullopt when the rank has joined.
  int64_t WordOf(const std::optional<JoinAnnouncement>& announcement) const;

  // Returns the verdict over the words of all ranks, by rank. The words include this rank's own.
  JoinVerdict Read(const std::vector<int64_t>& words);

  // Returns the highest rank that had inputs in the last round; 0 when there was no round.
  int last_joiner() const { return last_joiner_; }

  // Returns a warning when the last round was the kRoundsBeforeWarning-th after this rank had
  // joined.
  std::optional<std::string> Warning() const;

  // Returns the error message for an announcement that comes before the collectives of the joinable
  // `busy` are complete.
  std::string Overlap(const JoinAnnouncement& announcement, size_t busy) const;

 private:
  std::string NameOf(size_t joinable) const;
  std::string Describe(const JoinAnnouncement& announcement) const;
  std::string DifferentJoins(const std::vector<int64_t>& words) const;
  std::string DifferentEvents(const std::vector<int64_t>& words) const;
  std::string EarlyTermination(const std::vector<int>& active_ranks, bool joined) const;

  const int rank_;
  const int size_;
  const JoinTerms terms_;
  const Names names_;
  int last_joiner_ = 0;
  int64_t rounds_as_joined_ = 0;
  std::vector<int> last_active_;
};

}  // namespace ddp::internal

#endif  // DDP_JOIN_JOIN_CORE_H_
