// Marks functions that other libraries may call; everything else is hidden.

#pragma once

#define EXPORTED __attribute__((visibility("default")))
