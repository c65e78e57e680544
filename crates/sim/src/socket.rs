//! Connections between clients and gateways: in order, or cut.

use crate::{
    checks::View,
    node::Wire,
    world::{Event, World},
};

pub struct Socket {
    pub device: usize,
    /// The life of the client program that opened it.
    pub life: u64,
    pub gateway: usize,
    pub boot: u32,
    pub conn: u64,
    /// Nothing arrives any more, in either direction.
    pub is_cut: bool,
    pub client_has_it: bool,
    /// When what was sent last arrives: nothing overtakes it.
    up_until: u64,
    down_until: u64,
    pub view: View,
}

impl Socket {
    pub fn new(device: usize, life: u64, gateway: usize, boot: u32, conn: u64) -> Self {
        Self {
            device,
            life,
            gateway,
            boot,
            conn,
            is_cut: false,
            client_has_it: true,
            up_until: 0,
            down_until: 0,
            view: View::default(),
        }
    }
}

impl World {
    pub fn send_to_gateway(&mut self, socket: usize, wire: Wire) {
        let delay = self.rng.range(0, self.plan.network.socket_ms);
        let found = &mut self.sockets[socket];
        let at = (self.now + delay).max(found.up_until);
        found.up_until = at;
        self.at(at, Event::ToGateway { socket, wire });
    }

    pub fn send_to_client(&mut self, socket: usize, wire: Wire) {
        let delay = self.rng.range(0, self.plan.network.socket_ms);
        let found = &mut self.sockets[socket];
        let at = (self.now + delay).max(found.down_until);
        found.down_until = at;
        self.at(at, Event::ToClient { socket, wire });
    }
}
