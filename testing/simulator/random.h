#ifndef DDP_TESTING_SIMULATOR_RANDOM_H_
#define DDP_TESTING_SIMULATOR_RANDOM_H_

#include <cmath>
#include <cstdint>

namespace ddp::testing {

// A random generator (SplitMix64). Equal seeds give equal numbers on every machine and with every
// library, which <random>'s distributions do not promise. Only Exponential() depends on the
// library, by std::log(). Thread-compatible.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // Returns a number in [0, 1).
  double Fraction() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  bool Chance(double probability) { return Fraction() < probability; }

  // Returns a number in [low, high]. The bias of the remainder does not matter here.
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }

  int64_t Exponential(double mean) {
    return static_cast<int64_t>(-mean * std::log(1 - Fraction()));
  }

  // Returns an independent generator: draws from it do not change later draws from this one.
  Random Fork() { return Random(Next()); }

 private:
  uint64_t state_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_RANDOM_H_
