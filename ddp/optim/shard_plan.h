#ifndef DDP_OPTIM_SHARD_PLAN_H_
#define DDP_OPTIM_SHARD_PLAN_H_

#include <cstdint>
#include <vector>

namespace ddp::internal {

// Decides which rank updates which elements of which parameter (ZeRO, stage 1: Rajbhandari et al.,
// SC 2020). Each element belongs to exactly one rank. Parameters are numbered in the order of
// Add(). A value; pure; thread-compatible. Equal input gives equal plans on all ranks.
class ShardPlan {
 public:
  enum class Mode : uint8_t {
    kEven,   // each rank owns a contiguous slice of each bucket
    kWhole,  // each rank owns whole parameters
  };

  struct Options {
    Mode mode = Mode::kEven;
    int ranks = 1;
    int64_t bucket_bytes = int64_t{25} << 20;  // a bucket is closed when it has reached this size
  };

  // The properties of one parameter that the plan needs.
  struct Tensor {
    int64_t elements = 0;
    int64_t element_bytes = 4;
    int kind = 0;      // parameters of different kinds (type, device) never share a bucket
    bool flat = true;  // its elements fill its memory without a gap, so a slice may cut it
  };

  // Elements [begin, end) of one parameter, in the order of its memory.
  struct Piece {
    int parameter = 0;
    int64_t begin = 0;
    int64_t end = 0;
    int64_t offset = 0;  // of `begin` in the bucket
    bool whole = false;  // it is in a bucket with an owner, and so keeps its shape

    int64_t size() const { return end - begin; }
    friend bool operator==(const Piece&, const Piece&) = default;
  };

  // A bucket holds its parameters one after the other. A bucket without an owner is cut into one
  // part per rank, of `part` elements each; the last parts may be shorter or empty.
  struct Bucket {
    std::vector<int> parameters;
    int owner = -1;        // the rank that owns the whole bucket; -1: all ranks have a part
    int64_t elements = 0;  // of all its parameters
    int64_t part = 0;      // ceil(elements / ranks), or `elements` with an owner
  };

  // CHECKs that there is a rank and that the size of a bucket is positive.
  explicit ShardPlan(const Options& options);

  // Adds the parameters of several groups. Earlier parameters keep their place.
  // - kEven: fills the buckets with the parameters from the last to the first, because a backward
  //   reaches the last layers first. One rank gets the whole of a parameter that is not flat.
  // - kWhole: sorts each group by falling size and gives each parameter to the rank with the fewest
  //   elements, the lowest of several; as PyTorch's ZeroRedundancyOptimizer does.
  void Add(const std::vector<std::vector<Tensor>>& groups);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  int parameters() const { return static_cast<int>(tensors_.size()); }

  // Returns what `rank` owns of a bucket, without empty pieces.
  std::vector<Piece> Pieces(int bucket, int rank) const;

  // Returns the number of elements that `rank` owns.
  int64_t ElementsOf(int rank) const { return load_[rank]; }

 private:
  void AddWhole(std::vector<int> parameters);
  void AddEven(const std::vector<int>& parameters);
  void Close(Bucket bucket);

  Options options_;
  std::vector<Tensor> tensors_;
  std::vector<Bucket> buckets_;
  std::vector<int64_t> load_;  // elements by rank
};

}  // namespace ddp::internal

#endif  // DDP_OPTIM_SHARD_PLAN_H_
