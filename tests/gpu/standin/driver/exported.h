// Marks what other libraries may call; everything else stays inside.

#pragma once

#define EXPORTED __attribute__((visibility("default")))
