#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| dislodge_fuzz::library(bytes));
