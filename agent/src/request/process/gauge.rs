//! What a server says of its queues itself.

use super::{
    super::gauge::{GaugeState, Gauges},
    Process,
};
use crate::event::clock::Monotonic;

impl Process {
    pub(in crate::request) fn server_metrics(&mut self, gauges: Gauges, at: Monotonic) {
        let before = self.state.gauge.read.take().map(|before| *before);
        self.state.gauge.read = Some(Box::new(GaugeState::after(before, gauges, at)));
    }
}
