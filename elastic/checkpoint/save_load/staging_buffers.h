#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_STAGING_BUFFERS_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_STAGING_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace ddp::elastic {

// Host memory for the staged copies of saves: a fixed number of buffers that are used again and
// again. A buffer is allocated when it is first needed and when a copy needs more room. Its pages
// are then touched, so that a later copy into it meets no page fault.
//
// Thread-safe. One thread takes buffers; any thread returns one.
class StagingBuffers {
 public:
  explicit StagingBuffers(int count);
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  // A buffer in use. The destructor returns it. May outlive the StagingBuffers. Move-only.
  class Lease {
   public:
    Lease(Lease&&) noexcept;
    Lease& operator=(Lease&&) = delete;
    ~Lease();

    char* data() const;  // aligned to a page

   private:
    friend class StagingBuffers;
    struct Pool;
    Lease(std::shared_ptr<Pool> pool, size_t index) : pool_(std::move(pool)), index_(index) {}

    std::shared_ptr<Pool> pool_;  // null after a move
    size_t index_;
  };

  // Returns true when a buffer is free. It stays free until this thread takes it.
  bool HasFree() const;

  // Returns a free buffer of at least `bytes`; its content is undefined. Requires HasFree().
  // kResourceExhausted: there is not so much memory.
  absl::StatusOr<Lease> Take(uint64_t bytes);

 private:
  const std::shared_ptr<Lease::Pool> pool_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_STAGING_BUFFERS_H_
