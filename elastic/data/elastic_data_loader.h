#ifndef DDP_ELASTIC_DATA_ELASTIC_DATA_LOADER_H_
#define DDP_ELASTIC_DATA_ELASTIC_DATA_LOADER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/data/worker_threads.h"

namespace ddp::elastic {

// Reads the samples of an ElasticSampler's batches from a dataset of LibTorch, ahead of their use,
// on threads of its own.
//
//   ElasticDataLoader loader(dataset.map(Normalize<>(0.5, 0.5)).map(Stack<>()),
//                            training.sampler(), {.workers = 4});
//   while (const auto batch = training.next_batch()) {
//     const auto data = loader.load(*batch);           // nullopt: this rank has no sample
//     ...
//     training.step(loss);
//   }
//
// The loader has no position of its own: the sampler's, which checkpoints hold, is the trained one.
// load() returns exactly the samples of the batch that the caller has drawn, so each sample is used
// exactly once per epoch at any sequence of world sizes, as without the loader. Read-ahead follows
// a copy of the sampler. After a restore, a new epoch or a batch out of order the loader drops what
// it has read ahead and begins again at the batch that it is asked for: that costs time only. The
// options of the sampler for the end of an epoch (drop_last, min_samples_per_rank) hold here too.
//
// Dataset: a map-style dataset of LibTorch, with transforms or without: a type with BatchType and
// `BatchType get_batch(indices)` for a std::vector<size_t>. BatchType is a vector of examples, or,
// with Stack<>, one example. Each worker thread has a copy of the dataset, as in LibTorch's loader:
// tensors in it are shared between the copies. Transforms run on the workers. A transform that
// draws random numbers takes them from the process's generator in an order that differs between
// runs when there are several workers.
//
// Thread-compatible. Requires: the sampler outlives the loader, and is not used during load().
template <typename Dataset>
class ElasticDataLoader {
 public:
  using Data = typename Dataset::BatchType;

  struct Options {
    int workers = 1;   // threads; 0: load() reads on the caller's thread, and nothing is read ahead
    int prefetch = 2;  // batches that are read ahead, >= 1; with fewer than workers some are idle

    // load() throws when the batch is not there after this time. The time counts from load().
    std::chrono::milliseconds timeout = std::chrono::minutes(10);
  };

  // Throws std::invalid_argument when an option is out of range, and std::system_error when there
  // is no thread left.
  ElasticDataLoader(Dataset dataset, const ElasticSampler& sampler, Options options = {})
      : options_(options), sampler_(&sampler) {
    Require(options.workers >= 0, "workers is negative");
    Require(options.prefetch >= 1, "prefetch is less than 1");
    Require(options.timeout.count() > 0, "timeout is not positive");
    datasets_.assign(static_cast<size_t>(options.workers > 0 ? options.workers : 1), dataset);
    if (options.workers > 0) threads_ = std::make_unique<WorkerThreads>(options.workers);
  }

  // Blocks until reads in progress have ended.
  ~ElasticDataLoader() = default;
  ElasticDataLoader(const ElasticDataLoader&) = delete;
  ElasticDataLoader& operator=(const ElasticDataLoader&) = delete;

  // Returns the samples of `batch`, which the sampler has returned last; nullopt when it has none.
  // Reads the following batches ahead. Blocks until the samples are there.
  //
  // Throws what the dataset has thrown for this batch, and std::runtime_error after the timeout. A
  // call for the same batch then reads it again.
  std::optional<Data> load(const ElasticSampler::Batch& batch) {
    if (threads_ == nullptr) return Read(datasets_[0], batch.indices);
    if (ahead_.empty() || !IsSame(ahead_.front()->batch, batch)) {
      StartAt(batch);
    }
    const std::shared_ptr<Slot> slot = ahead_.front();
    ahead_.pop_front();
    Fill();
    return Await(*slot);
  }

  // Returns how many batches are read ahead now, or are being read.
  size_t batches_ahead() const { return ahead_.size(); }

 private:
  // One batch that a worker reads.
  struct Slot {
    explicit Slot(ElasticSampler::Batch of) : batch(std::move(of)) {}

    const ElasticSampler::Batch batch;
    Mutex mutex;
    CondVar ready;
    bool is_ready ABSL_GUARDED_BY(mutex) = false;
    std::optional<Data> data ABSL_GUARDED_BY(mutex);
    std::exception_ptr error ABSL_GUARDED_BY(mutex);
  };

  static void Require(bool condition, const char* problem) {
    if (!condition) throw std::invalid_argument(std::string("ElasticDataLoader: ") + problem);
  }

  static bool IsSame(const ElasticSampler::Batch& a, const ElasticSampler::Batch& b) {
    return a.epoch == b.epoch && a.position == b.position && a.indices == b.indices;
  }

  static std::optional<Data> Read(Dataset& dataset, const std::vector<int64_t>& indices) {
    if (indices.empty()) return std::nullopt;
    return dataset.get_batch(std::vector<size_t>(indices.begin(), indices.end()));
  }

  // Forgets what is read ahead. `batch` is next, and then what the sampler will return.
  void StartAt(const ElasticSampler::Batch& batch) {
    threads_->DropWaiting();
    ahead_.clear();
    drawer_ = *sampler_;
    Submit(batch);
  }

  // Keeps `prefetch` batches ahead, to the end of the epoch.
  void Fill() {
    while (ahead_.size() < static_cast<size_t>(options_.prefetch)) {
      std::optional<ElasticSampler::Batch> batch = drawer_->next_batch();
      if (!batch.has_value()) return;
      Submit(*std::move(batch));
    }
  }

  void Submit(ElasticSampler::Batch batch) {
    auto slot = std::make_shared<Slot>(std::move(batch));
    ahead_.push_back(slot);
    threads_->Submit([this, slot](int worker) {
      std::optional<Data> data;
      std::exception_ptr error;
      try {
        data = Read(datasets_[static_cast<size_t>(worker)], slot->batch.indices);
      } catch (...) {
        error = std::current_exception();
      }
      MutexLock lock(slot->mutex);
      slot->data = std::move(data);
      slot->error = error;
      slot->is_ready = true;
      slot->ready.NotifyAll();
    });
  }

  std::optional<Data> Await(Slot& slot) {
    const absl::Duration timeout = absl::FromChrono(options_.timeout);
    MutexLock lock(slot.mutex);
    while (!slot.is_ready) {
      if (slot.ready.WaitFor(slot.mutex, timeout) || slot.is_ready) continue;
      ahead_.clear();  // a call for the same batch begins anew
      throw std::runtime_error(
          "ElasticDataLoader: the " + std::to_string(slot.batch.indices.size()) +
          " samples of the batch at position " + std::to_string(slot.batch.position) +
          " of epoch " + std::to_string(slot.batch.epoch) + " were not read within " +
          std::to_string(options_.timeout.count()) +
          " ms: look at the dataset's disk, or raise "
          "Options::timeout");
    }
    if (slot.error != nullptr) {
      ahead_.clear();
      std::rethrow_exception(slot.error);
    }
    return std::move(slot.data);
  }

  const Options options_;
  const ElasticSampler* const sampler_;
  std::vector<Dataset> datasets_;            // by worker; worker i uses entry i only
  std::optional<ElasticSampler> drawer_;     // draws the batches that are read ahead
  std::deque<std::shared_ptr<Slot>> ahead_;  // in the sampler's order
  std::unique_ptr<WorkerThreads> threads_;  // null: no workers; last, as jobs use all other members
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_DATA_ELASTIC_DATA_LOADER_H_
