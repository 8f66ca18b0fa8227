// A stand-in for the base class that c10d derives from: LibTorch carries Gloo without its headers.
#ifndef DDP_THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_
#define DDP_THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

// Only so that ProcessGroupGloo.hpp can derive from it on paper: nothing of ours makes or calls
// one, and the real class, with its own layout of virtuals, stays inside LibTorch.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace gloo::rendezvous

#endif  // DDP_THIRD_PARTY_GLOO_RENDEZVOUS_STORE_H_
