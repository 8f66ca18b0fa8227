// How node 0 of a static rendezvous proves that it knows the job's password, before another node
// sends the password to the address that node 0 names.
//
//   node -> node 0   a fresh nonce of 32 bytes
//   node 0 -> node   MASTER, HOST, PORT, a fresh nonce of its own, and
//                    HMAC-SHA256(password, purpose, both nonces, MASTER, HOST, PORT)
//
// MASTER is node 0's own --master-addr and --master-port, HOST and PORT are where its Redis server
// is. The password itself travels in neither direction. A program that holds MASTER_PORT without
// the password cannot answer; an answer that it fetches from the real node 0 names the real server.
// An answer cannot be used again, since the next question has another nonce.
//
// Someone who gets an answer can try passwords on it at home: choose a long random one.
#ifndef DDP_LAUNCHER_ADDRESS_PROOF_H_
#define DDP_LAUNCHER_ADDRESS_PROOF_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ddp::launcher {

// What node 0 says of itself.
struct ProvenAddress {
  std::string master;  // "HOST:PORT" of its flags
  std::string host;    // of its Redis server
  int port = 0;

  friend bool operator==(const ProvenAddress&, const ProvenAddress&) = default;
};

// A fresh nonce, as 64 hexadecimal digits. Errors: the system's.
absl::StatusOr<std::string> MakeNonce();

// Node 0's answer to the nonce of a node; empty where that is no nonce. `own_nonce` is a fresh one.
// Pure.
std::string AnswerChallenge(absl::string_view password, const ProvenAddress& address,
                            const std::string& nonce, const std::string& own_nonce);

// The address in `answer`, which a node got for `nonce`. Nothing in `answer` can be believed before
// this function returns. Pure.
//
// kDataLoss: that is no answer. kUnauthenticated: its sender does not know `password`.
absl::StatusOr<ProvenAddress> CheckAnswer(absl::string_view password, const std::string& nonce,
                                          const std::string& answer);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_ADDRESS_PROOF_H_
