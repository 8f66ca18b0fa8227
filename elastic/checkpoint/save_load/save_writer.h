#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_WRITER_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_WRITER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// Runs saves one after the other, in the order in which they were added, on a thread of its own.
// The thread that trains adds them and goes on.
//
// Every rank adds the same saves in the same order, also those that this rank cannot take part in:
// such a save only tells the other ranks. So the saves of the ranks meet without a collective on
// the training thread.
//
// Threads: Add() and the destructor on one thread at a time; all else on any thread. The thread
// "ddp-checkpoint" starts with the first Add(). Without a free thread Add() runs the save itself.
class SaveWriter {
 public:
  // Returns the checkpoint's folder. On the writer thread an exception becomes kInternal.
  using Work = std::function<absl::StatusOr<std::string>()>;

  // A save that was added. May outlive the SaveWriter.
  class Task {
   public:
    // nullptr: not ended. Valid as long as the Task.
    const absl::StatusOr<std::string>* Result() const;

    // Blocks until the save has ended. Calls `on_progress` (may be null) on this thread whenever
    // the writer has made progress with this save or an earlier one.
    const absl::StatusOr<std::string>& Await(const std::function<void()>& on_progress) const;

   private:
    friend class SaveWriter;
    struct Shared;
    std::shared_ptr<Shared> shared_;
    Work work_;  // of the writer's thread; destroyed before the save counts as ended
    std::unique_ptr<const absl::StatusOr<std::string>> result_;  // null: not ended
  };

  SaveWriter();
  // Blocks until every added save has ended. Call Drain() before, to see the progress.
  ~SaveWriter();
  SaveWriter(const SaveWriter&) = delete;
  SaveWriter& operator=(const SaveWriter&) = delete;

  // Returns a save that has ended already, with `result`: all ranks leave it out.
  static std::shared_ptr<const Task> Ended(absl::StatusOr<std::string> result);

  // Adds a save. Blocks, with `on_progress` as Task::Await(), only while kPendingMax saves wait.
  std::shared_ptr<const Task> Add(Work work, const std::function<void()>& on_progress);

  // Runs a save on this thread, after all others have ended.
  std::shared_ptr<const Task> RunHere(Work work, const std::function<void()>& on_progress);

  // Blocks until every added save has ended, as Task::Await().
  void Drain(const std::function<void()>& on_progress);

  // Blocks until the oldest of the saves that have not ended has ended. Returns at once when there
  // is none.
  void AwaitOldest(const std::function<void()>& on_progress);

  // Returns true when every added save has ended.
  bool IsIdle() const;

  // Wakes the threads that wait for a save. For the work.
  void Progressed();

  // Returns true on the writer's own thread.
  bool IsWriterThread() const;

  // A bound. Saves that have a staging buffer never reach it. Those that only tell the other ranks
  // may, while a save lasts or the store is away.
  static constexpr size_t kPendingMax = 16;

 private:
  void Run();

  const std::shared_ptr<Task::Shared> shared_;
  std::thread thread_;  // joinable: running
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_WRITER_H_
