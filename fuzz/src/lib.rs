//! What the targets share.

/// Cuts `bytes` into pieces whose lengths follow from `cuts`, none of them empty.
pub fn pieces<'a>(mut bytes: &'a [u8], cuts: &'a [u8]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for cut in cuts {
        let (piece, rest) = bytes.split_at(bytes.len().min(usize::from(*cut) + 1));
        if piece.is_empty() {
            return pieces;
        }
        pieces.push(piece);
        bytes = rest;
    }
    if !bytes.is_empty() {
        pieces.push(bytes);
    }
    pieces
}
