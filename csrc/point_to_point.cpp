#include "point_to_point.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "rust/bridge/entries.rs.h"

namespace gflow {
namespace {

// Gloo's tags are the numbers from 0 to 2^31 - 1. The user's come first; the others name the
// answer to and the data of one message.
constexpr int kUserTags = 1 << 30;
constexpr int kAnswers = 1 << 30;
constexpr int kData = kAnswers + (1 << 29);
constexpr int kNumbers = 1 << 29;

// The peer may take part much later than this rank; whoever waits has a limit of its own.
constexpr auto kNoLimit = std::chrono::hours(24 * 365);

// What a sender shows and a receiver answers: number of the message, elements, type, yes or no.
enum Field { kNumber, kElements, kType, kFits, kFields };

at::Tensor envelope(int64_t number, const at::Tensor& tensor, bool fits) {
  return at::tensor({number, tensor.numel(), static_cast<int64_t>(tensor.scalar_type()),
                     static_cast<int64_t>(fits)},
                    at::kLong);
}

std::string view(const at::Tensor& envelope) {
  const auto* fields = envelope.const_data_ptr<int64_t>();
  return c10::str(fields[kElements], " elements of ",
                  std::string(dtype_name(static_cast<uint8_t>(fields[kType]))));
}

void check(const at::Tensor& tensor, int tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < kUserTags, "gflow: the tag of a message must be from 0 to ",
                    kUserTags - 1, ", got ", tag);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(),
                    "gflow: tensors must be contiguous to be sent or received: call .contiguous()");
}

[[noreturn]] void refuse(const at::Tensor& sent, const at::Tensor& expected, int tag) {
  C10_THROW_ERROR(DistBackendError,
                  c10::str("gflow: send and recv do not fit: the sender has ", view(sent),
                           ", the receiver expects ", view(expected), " (tag ", tag,
                           "). Both must have the same size and type; no data was exchanged"));
}

}  // namespace

std::function<void()> PointToPoint::begin_send(const at::Tensor& tensor, int to, int tag) {
  check(tensor, tag);
  int number;
  {
    // The envelope must go out in the order of the numbers.
    std::lock_guard<std::mutex> lock(mutex_);
    number = static_cast<int>(next_number_[to]++ % kNumbers);
    std::vector<at::Tensor> shown{envelope(number, tensor, true)};
    std::vector<at::Tensor> answer{at::empty({kFields}, at::kLong)};
    auto showing = gloo_->send(shown, to, tag);
    auto answering = gloo_->recv(answer, to, kAnswers + number);
    return [=, gloo = gloo_] {
      showing->wait(kNoLimit);
      answering->wait(kNoLimit);
      if (answer[0].const_data_ptr<int64_t>()[kFits] == 0) refuse(shown[0], answer[0], tag);
      std::vector<at::Tensor> data{tensor};
      gloo->send(data, to, kData + number)->wait();
    };
  }
}

std::function<int()> PointToPoint::begin_receive(const at::Tensor& tensor, int from, int tag) {
  check(tensor, tag);
  std::vector<at::Tensor> shown{at::empty({kFields}, at::kLong)};
  auto showing =
      from == kAnySource ? gloo_->recvAnysource(shown, tag) : gloo_->recv(shown, from, tag);
  return [=, gloo = gloo_] {
    showing->wait(kNoLimit);
    const int source = from == kAnySource ? showing->sourceRank() : from;
    const auto* fields = shown[0].const_data_ptr<int64_t>();
    const auto number = static_cast<int>(fields[kNumber]);
    const bool fits = fields[kElements] == tensor.numel() &&
                      fields[kType] == static_cast<int64_t>(tensor.scalar_type());
    std::vector<at::Tensor> answer{envelope(number, tensor, fits)};
    std::vector<at::Tensor> data{tensor};
    // Posted before the answer, so that the data finds its place when it comes.
    c10::intrusive_ptr<c10d::Work> receiving;
    if (fits) receiving = gloo->recv(data, source, kData + number);
    gloo->send(answer, source, kAnswers + number)->wait();
    if (!fits) refuse(shown[0], answer[0], tag);
    receiving->wait();
    return source;
  };
}

}  // namespace gflow
